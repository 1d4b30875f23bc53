"""Requests with pictures, as objects of vLLM's own classes in the form that its scheduler uses."""

from __future__ import annotations

from typing import Any

import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)


def picture(seed: int, name: str = "img-1", offset: int = 20, length: int = 30, **more: Any) -> MultiModalFeatureSpec:
    """Return a picture with an id, whose pixels follow from the seed, at these positions of a prompt. more: other
    fields."""
    pixels = torch.full((3, 8, 8), float(seed))
    fields: dict[str, Any] = {
        "data": MultiModalKwargsItem({"pixel_values": MultiModalFieldElem(pixels, MultiModalBatchedField())}),
        "modality": "image",
        "identifier": name,
        "mm_position": PlaceholderRange(offset, length),
    }
    return MultiModalFeatureSpec(**{**fields, **more})
