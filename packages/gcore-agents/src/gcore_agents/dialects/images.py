"""Images in the bodies of calls: base64 within limits, and nothing that would have to be fetched."""

import base64

from gcore_agents.chat.images import ImageProcessor, digest_image
from gcore_agents.dialects.fields import JsonFields
from gcore_agents.errors import CallError

MAX_IMAGE_BYTES = 16 << 20
"""Longest image file."""
MAX_PIXELS = 1 << 24
"""Most pixels of an image, which is not decoded if it says that it has more."""
_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
_SIGNATURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"RIFF")
"""First bytes of files of these types: no other decoder gets to see bytes of an agent."""


class ImageReader:
    """Reads the images of a session's calls; each is decoded once, however often it is sent again.

    Example:
        >>> class Any:
        ...     def check_image(self, image, *, max_pixels):
        ...         pass
        >>> url = "data:image/gif;base64," + base64.b64encode(b"GIF89a...").decode()
        >>> ImageReader(Any()).read_url(JsonFields({"url": url}), "url")
        b'GIF89a...'
    """

    def __init__(self, processor: ImageProcessor) -> None:
        self._processor = processor
        self._images: dict[str, bytes] = {}
        """Files by their digests, one copy of each for all calls."""

    def read_url(self, fields: JsonFields, field: str) -> bytes:
        """Return the image file in a ``data:`` URL."""
        scheme, _, rest = fields.require_text(field).partition(":")
        media_type, mark, data = rest.partition(";base64,")
        if scheme != "data" or not mark:
            fields.fail(field, "data:image/png;base64,...: nothing is fetched")
        return self._decode(fields, field, media_type, data, field)

    def read_base64(self, fields: JsonFields, field: str, type_field: str) -> bytes:
        """Return the image file in a field, with its media type in another."""
        media_type = fields.require_text(type_field)
        return self._decode(fields, field, media_type, fields.require_text(field), type_field)

    def _decode(
        self, fields: JsonFields, field: str, media_type: str, data: str, type_field: str
    ) -> bytes:
        if media_type not in _TYPES:
            fields.fail(type_field, " or ".join(_TYPES))
        if len(data) * 3 // 4 > MAX_IMAGE_BYTES:
            fields.fail(field, f"an image of up to {MAX_IMAGE_BYTES >> 20} MiB")
        try:
            image = base64.b64decode(data, validate=True)
        except ValueError:
            fields.fail(field, "base64")
        if not image.startswith(_SIGNATURES):
            fields.fail(field, f"a file of the type {media_type}")
        digest = digest_image(image)
        if digest not in self._images:
            try:
                self._processor.check_image(image, max_pixels=MAX_PIXELS)
            except ValueError as error:
                name = fields.name(field)
                raise CallError(
                    f"{name} is no image that the model takes: {error}", field=name
                ) from error
            self._images[digest] = image
        return self._images[digest]
