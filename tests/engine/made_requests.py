"""vLLM's own requests with pictures, as its scheduler has them."""

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
    """A picture with the pixels of this seed, under an id, at some places of a prompt. more: other fields."""
    pixels = torch.full((3, 8, 8), float(seed))
    fields: dict[str, Any] = {
        "data": MultiModalKwargsItem({"pixel_values": MultiModalFieldElem(pixels, MultiModalBatchedField())}),
        "modality": "image",
        "identifier": name,
        "mm_position": PlaceholderRange(offset, length),
    }
    return MultiModalFeatureSpec(**{**fields, **more})
