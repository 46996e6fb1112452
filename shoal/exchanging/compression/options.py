"""What an exchange can be told about compression."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field, model_validator

from shoal.errors import ConfigError
from shoal.exchanging.base import Kind
from shoal.exchanging.compression.codecs import DENSITY, Codec, make_codec

FLOAT_BYTES = 4
"""Bytes are predicted for weights of this element size (float32)."""


class Compressing(Kind):
    """An exchange whose replicas may send less than they have; error feedback sends the rest later."""

    compress: Literal["none", "bf16", "int8", "topk", "sign"] = "none"
    """How gradients, changes or weights are made smaller before they are sent: bf16 (half), int8 (a quarter), topk (the
    largest `density` of them), sign (one bit each). What is lost is added to the next ones."""
    density: float | None = Field(default=None, gt=0, le=1)
    """Share of the elements that compress=topk sends. Unless given 0.01."""

    @model_validator(mode="after")
    def _check_density(self) -> "Compressing":
        if self.density is not None and self.compress != "topk":
            raise ConfigError(
                f"density = {self.density:g} is of compress=topk, but compress = {self.compress!r}.",
                "Give compress=topk with it, or leave it out.",
            )
        return self

    @property
    def hands_in(self) -> bool:
        """What was not sent yet is each replica's own."""
        return super().hands_in or self.compress != "none"

    @property
    def codec(self) -> Codec | None:
        """None where nothing is compressed."""
        return None if self.compress == "none" else make_codec(self.compress, self.density or DENSITY)

    def pushed_bytes(self, weights: int) -> int:
        """Bytes of a push of so many bytes of weights to one server; with several servers each may add one scale."""
        return weights if self.codec is None else self.codec.nbytes(weights // FLOAT_BYTES, torch.float32)

    def compression_terms(self) -> Mapping[str, Any]:
        """The fields of `servers.server.Terms` that tell servers about compression."""
        return {"compress": self.compress, "density": self.density or DENSITY}
