"""Images in requests: from the bytes that a client sends to placeholders in a prompt.

source.py     where the bytes of an image come from, as each API spells it
fetch.py      loads the images that a request names by a URL
settings.py   the settings of a model's image processor, from the files of its checkpoint
families.py   which processor a family has, and the text that replaces an image's marker
marks.py      marks images in a conversation, and finds their placeholders in the prompt
reader.py     decodes and preprocesses images in a sandbox process, and caches the results
decode.py     decodes an image; runs in the sandbox process only
processor.py  preprocesses an image; runs in the sandbox process only
"""
