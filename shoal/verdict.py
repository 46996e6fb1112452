"""Verdict: whether a plan gave one device's numbers, how far each layer is off, and which layer is at fault."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, computed_field

_FROZEN = ConfigDict(
    frozen=True, use_attribute_docstrings=True, protected_namespaces=(), ser_json_inf_nan="strings", extra="forbid"
)

Fault = Literal[
    "capture",
    "output",
    "result",
    "input gradient",
    "parameter gradient",
    "buffers",
    "evaluation",
    "steps",
]


def _largest(*differences: float | None) -> float | None:
    return max((one for one in differences if one is not None), default=None)


class LayerDifferences(BaseModel):
    """How far one layer is from one device: largest difference over the largest element; null: not compared."""

    model_config = _FROZEN

    layer: str
    """Its name in the captured network, or that of a tensor which no layer uses."""
    op: str
    cut: str
    output: float | None = None
    output_gradient: float | None = None
    parameter_gradient: float | None = None
    buffers: float | None = None
    """After the first forward pass."""
    after_steps: float | None = None
    """Its parameters and buffers after the last step."""

    @property
    def gradient(self) -> float | None:
        """Of its output or of its parameters, whichever is larger."""
        return _largest(self.output_gradient, self.parameter_gradient)

    @property
    def first_pass(self) -> float:
        """The largest of all but what comes after the steps."""
        return _largest(self.output, self.gradient, self.buffers) or 0.0

    @property
    def worst(self) -> float:
        """The largest of them."""
        return max(self.first_pass, self.after_steps or 0.0)


class Culprit(BaseModel):
    """The first thing that is wrong though everything it depends on is right."""

    model_config = _FROZEN

    layers: tuple[str, ...]
    """Usually one; several only where they share the parameter whose gradient is wrong."""
    op: str
    cut: str
    fault: Fault
    difference: float
    mixes_samples: bool = False
    """Whether its operator is one that `batch_norm="local"` changes."""

    def __str__(self) -> str:
        one = f"layer {self.layers[0]!r}" if len(self.layers) == 1 else f"one of the layers {', '.join(self.layers)}"
        who = f"{one} ({self.op.removeprefix('aten.').removesuffix('.default')}, cut {self.cut})" if self.op else one
        return {
            "capture": f"the captured network is not the module, from {who} on",
            "output": f"{who} computes another output",
            "result": f"every layer is right, but not the result that the ranks get from {who}",
            "input gradient": f"{who} passes back another gradient",
            "parameter gradient": f"{who} gives its parameters another gradient",
            "buffers": f"{who} leaves other buffers",
            "evaluation": f"{who} computes another output in evaluation",
            "steps": f"{who} has other parameters or buffers after the steps, though the first pass is right",
        }[self.fault] + f": relative difference {self.difference:.1e}"


class Verdict(BaseModel):
    """A plan against one device. Differences are relative to the largest element of the tensor, or, for tensors that
    are nearly zero, to a thousandth of the largest of their kind in the network.
    """

    model_config = _FROZEN

    schema_: Literal["shoal.verify/1"] = Field(default="shoal.verify/1", alias="schema")
    model: str
    plan: str
    workers: int
    input: tuple[int, ...]
    """The global batch: samples first."""
    dtype: str
    steps: int
    tolerance: float
    """For the first pass: outputs, loss, gradients, buffers."""
    later_tolerance: float
    """For what comes after the steps; above `tolerance` only where one device itself is far from itself by then."""
    batch_norm: str
    seed: int
    output: float | None
    """Of the first training pass; null where the loss is part of the network and keeps it cut."""
    loss: float
    input_gradient: float | None
    evaluation: float | None
    """The output in evaluation, after the last step."""
    rows: tuple[LayerDifferences, ...]
    """One per layer, in the network's order."""
    culprit: Culprit | None
    versions: dict[str, str]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def worst(self) -> float:
        """The largest difference of the first pass."""
        return max(_largest(self.output, self.loss, self.input_gradient) or 0.0, *(r.first_pass for r in self.rows))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def worst_later(self) -> float:
        """The largest difference after the steps."""
        return max(self.evaluation or 0.0, *(row.after_steps or 0.0 for row in self.rows))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether no difference exceeds its tolerance, and the captured network is the module."""
        return self.worst <= self.tolerance and self.worst_later <= self.later_tolerance and self.culprit is None

    def to_json(self) -> str:
        """All of it, as versioned JSON."""
        return self.model_dump_json(indent=2, by_alias=True) + "\n"
