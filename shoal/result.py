"""RunResult: what one run did, in one file that checks, tables and pages read."""

import platform
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shoal._version import __version__


class BytesPerStep(BaseModel):
    """Payload that crosses between ranks in one step: from the pure moves, and counted at the transport."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    predicted: int | None
    """None where it depends on the values that are sent, where steps have unequal batches (`last_batch: keep`), and
    with strategies of torch's own."""
    counted: int | None
    """None with strategies of torch's own, which send through groups of theirs where nobody counts."""


class Staleness(BaseModel):
    """How many updates a gradient was behind when it was applied (asynchronous exchanges only)."""

    model_config = ConfigDict(frozen=True)

    mean: float
    max: int
    histogram: dict[int, int] = Field(default_factory=dict)
    """Updates by staleness."""


class ReplicaReport(BaseModel):
    """What one replica did in an exchange."""

    model_config = ConfigDict(frozen=True)

    steps: int
    updates: int
    dropped: int
    wait_seconds: float
    train_seconds: float
    sent_bytes: int
    received_bytes: int


class ExchangeReport(BaseModel):
    """What happened between replicas."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    options: dict[str, Any]
    servers: str
    """Where weights are held: none, direct, processes or threads."""
    replicas: dict[int, ReplicaReport]
    repeated: int
    """Batches that were trained on twice, because a replica that had them was thought to be gone."""
    spread: float | None
    """Largest measured distance of a replica from the common weights, relative to their length."""
    events: list[dict[str, Any]]
    """Who joined, was lost, froze, came back, and when (seconds from the start)."""


class ClassScore(BaseModel):
    """How a test went for one class."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    samples: int
    """Samples, or pixels, that have this class."""
    accuracy: float | None
    """Share of them whose class was found; None where there are none."""


class BestTest(BaseModel):
    """The best test of a run, whose weights are in `best.safetensors`."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    epoch: int
    """In which it was, from 1."""
    step: int
    test_loss: float
    test_accuracy: float
    test_iou: float | None


class WentOn(BaseModel):
    """One time that a run went on by itself: after a loss, or with more workers."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    why: str
    lost: list[int]
    """Ranks, or replicas that the others needed, that were lost; none where the run grew."""
    workers_before: int
    workers_after: int
    step: int
    """After which it went on: its weights are those of this step."""
    checkpoint: str | None
    """Where they were; None: it began anew."""
    samples_again: int | None
    """Samples that had been trained on after that step, and were once more; None where nobody lived to tell."""
    noticed: float
    """When it was noticed, in seconds since 1970."""
    seconds_to_notice: float | None
    """From the last step of all to that moment, so at most; None where nobody lived to tell."""
    seconds_to_go_on: float | None = None
    """From that moment to the end of the first step after it; None where there was none."""


class RunResult(BaseModel):
    """`OUT/result.json`. A field that does not apply to a run is null; none is ever estimated."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, protected_namespaces=())

    schema_: Literal["shoal.result/1"] = Field(default="shoal.result/1", alias="schema")
    model: str
    data: str
    plan: str
    plan_in_words: str | None = None
    """How many layers are cut in which way, where one network is cut over workers."""
    exchange: str
    workers: int
    replicas: int
    seed: int
    epochs: int
    """Trained, fewer than were asked for where the run stopped early."""
    stopped_early: bool = False
    """Whether it did, because of `--patience`."""
    steps: int
    """Optimizer steps."""
    samples: int
    """Training samples seen, over all workers."""
    samples_left_out: int = 0
    """Samples at the ends of the epochs trained that were too few for a step; every epoch leaves out others."""
    samples_repeated: int = 0
    """Samples that were trained on twice because the run went on with batches of another size; in `samples` once."""
    restarts: int = 0
    """How often the run went on by itself, after a loss or with more workers."""
    went_on: list[WentOn] = Field(default_factory=list)
    """Each of these times."""
    final_loss: float
    """Mean training loss over the last epoch."""
    test_loss: float
    test_accuracy: float
    """Share of test samples (of test pixels, for segmentation) whose class is right."""
    test_iou: float | None
    """Segmentation: intersection over union of all classes but the background (class 0)."""
    best: BestTest | None = None
    """The best test by accuracy, or by intersection over union in segmentation; of equals the first."""
    per_class: dict[str, ClassScore] = Field(default_factory=dict)
    """Of the last test, by the names of the classes."""
    confusion: list[list[int]] | None = None
    """Of the last test: how often a class (row) was taken for another (column). Null with more than 100 classes."""
    step_seconds_median: float
    step_seconds_predicted: float | None = None
    """What the cost model said of the plan, where this network was profiled on this machine: `--plan auto` does."""
    samples_per_second: float
    """Training samples per second of training time, data loading included, tests excluded."""
    bytes_per_step: BytesPerStep
    peak_memory_bytes: list[int]
    """Per rank: largest resident size of the process, or largest allocation on an accelerator."""
    staleness: Staleness | None
    exchanged: ExchangeReport | None = None
    wall_seconds: float
    """From the first step to the last test, over all resumed parts."""
    parameters: int
    batch: int
    accumulate: int = 1
    """Batches of one step."""
    optimizer: str = "sgd"
    threads: int
    device: str
    origin: str
    """Where the data was found."""
    versions: dict[str, str]

    def to_json(self) -> str:
        """The text of `result.json`."""
        return self.model_dump_json(indent=2, by_alias=True) + "\n"


class EvaluateResult(BaseModel):
    """What `shoal evaluate` found. A field that does not apply is null."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, protected_namespaces=())

    schema_: Literal["shoal.evaluation/1"] = Field(default="shoal.evaluation/1", alias="schema")
    run: str
    """The folder or weights file."""
    data: str
    origin: str
    """Where the data was found."""
    samples: int
    plan: str
    workers: int
    batch: int
    device: str
    loss: float
    """Mean cross entropy, whatever loss the network was trained with."""
    own_loss: str | None = None
    """The loss of one's own that the run was trained with, whose name alone its folder holds. Null: cross entropy."""
    accuracy: float
    """Share of samples (of pixels, for segmentation) whose class is right."""
    iou: float | None
    """Segmentation: intersection over union of all classes but the background (class 0)."""
    per_class: dict[str, ClassScore]
    confusion: list[list[int]] | None
    """How often a class (row) was taken for another (column). Null with more than 100 classes."""
    seconds: float
    """Of the test itself, without loading."""
    versions: dict[str, str]

    def to_json(self) -> str:
        """As text for other programs."""
        return self.model_dump_json(indent=2, by_alias=True) + "\n"


def versions() -> dict[str, str]:
    """Versions that a number depends on."""
    return {
        "shoal": __version__,
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
        "platform": platform.platform(),
    }
