"""Images in messages: parts ``{"type": "image", "image": ...}`` with the bytes of an image file, in text or alone.

What the bytes show is known to the model's image processor alone, so that nothing here decodes them.
"""

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from typing import Any, Protocol

from gcore_agents.errors import MessageError


class ImageProcessor(Protocol):
    """The image processor of a vision-language model, such as gcore-rollout's ``VisionProcessor``.

    Its methods raise a `ValueError` for images that the model does not take.

    Example:
        >>> class FourTokens:
        ...     def check_image(self, image, *, max_pixels):
        ...         pass
        ...
        ...     def expand(self, token_ids, images):
        ...         return [token for token in token_ids for _ in range(4 if token == 9 else 1)]
        ...
        ...     def places(self, prompt_token_ids):
        ...         return [(prompt_token_ids.index(9), 4)]
        >>> FourTokens().expand([1, 9, 2], [b"an image file"])
        [1, 9, 9, 9, 9, 2]
    """

    def check_image(self, image: bytes, *, max_pixels: int) -> None:
        """Raise a `ValueError` for a file that does not decode, and before it is decoded for more pixels."""
        ...

    def expand(self, token_ids: Sequence[int], images: Sequence[bytes]) -> Sequence[int]:
        """Return tokens in which each image has as many as the model reads, for the one that a template writes."""
        ...

    def places(self, prompt_token_ids: Sequence[int]) -> Sequence[tuple[int, int]]:
        """Return the first token and the number of tokens of each image in expanded tokens."""
        ...


def join_parts(parts: Sequence[str | bytes]) -> str | list[dict[str, Any]]:
    """Return the content of texts and image files in a row; texts next to each other are joined by line ends."""
    if bytes not in map(type, parts):
        return "\n".join(map(str, parts))
    content: list[dict[str, Any]] = []
    for part_type, run in groupby(parts, type):
        if part_type is bytes:
            content += [{"type": "image", "image": image} for image in run]
        else:
            content.append({"type": "text", "text": "\n".join(map(str, run))})
    return content


def list_images(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Return the image files of messages in their order; `MessageError` if the bytes of one are missing."""
    images: list[bytes] = []
    for message in messages:
        for part in _list_parts(message):
            if part.get("type") == "image":
                image = part.get("image")
                if not isinstance(image, bytes):
                    raise MessageError(
                        f"an image is {image!r:.80}; expected the bytes of an image file"
                    )
                images.append(image)
    return images


def convert_images(
    messages: Sequence[Mapping[str, Any]], convert: Callable[[Any], Any]
) -> list[dict[str, Any]]:
    """Return messages with what a function makes of each image file."""
    converted: list[dict[str, Any]] = []
    for message in messages:
        copy = dict(message)
        parts = _list_parts(message)
        if parts:
            copy["content"] = [
                {**part, "image": convert(part["image"])} if "image" in part else part
                for part in parts
            ]
        converted.append(copy)
    return converted


def digest_image(image: bytes) -> str:
    """Return a digest that is equal for equal files."""
    return sha256(image).hexdigest()


def _list_parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else ()
