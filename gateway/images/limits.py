"""Limits of images. A server's limit for the whole body applies as well."""

from __future__ import annotations

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""The formats that are decoded, as Pillow names them."""
MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp")
MAX_IMAGES = 100
"""Most images of one request."""
MAX_IMAGE_BYTES = 32 << 20
"""Most bytes of one image in its file format."""
MAX_LOADED_BYTES = 4 * MAX_IMAGE_BYTES
"""Most bytes of all images that a gateway process loads from hosts and uploaded files at a time."""
MAX_URL_CHARS = 8192
"""Most characters of an http(s): URL."""
MAX_FILE_ID_CHARS = 128
MAX_PIXELS = 50_000_000
"""Most pixels of one image. In RGB they are 150 MB."""
MAX_SIDE = 30_000
"""Most pixels of one side of an image."""
MAX_PROCESS_S, MAX_FETCH_S = 60.0, 30.0
"""Time limits of the images of one request together, for preprocessing and for loading those with
an http(s): URL. The image that exceeds a limit is the last one."""
