"""Content parts that are not text: why each is refused, in every protocol."""

from __future__ import annotations

from typing import Any

from localgen.backends.errors import InvalidRequest

_READS_NO = {
    "image": "images",
    "image_url": "images",
    "input_image": "images",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "videos",
    "document": "documents: send their text",
    "file": "files: send their text",
    "input_file": "files: send their text",
}


def refusal_of_part(kind: str) -> str:
    """The reason why a content part of this type is refused."""
    what = _READS_NO.get(kind)
    return f"{kind[:40]!r} is not supported" if what is None else f"this model reads no {what}"


def reject_images(body: Any) -> Any:
    """Return the body. Raises InvalidRequest if its field `images` has any."""
    if isinstance(body, dict) and body.get("images"):
        raise InvalidRequest(f"images: {refusal_of_part('image')}", param="images")
    return body
