"""The web page: its files in `static/`, and the headers that they are sent with.

The page is plain HTML, CSS and JavaScript modules, sent as they are in the source tree. It holds no
data and no key. All data comes from the API, with the caller's own key.
"""
