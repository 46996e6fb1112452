"""Two plans of one network beside each other: which stages are cut differently, and what that costs. Pure."""

from dataclasses import dataclass

from shoal.outline import Outline, OutlineStage


@dataclass(frozen=True)
class StageDifference:
    """One stage under two plans; seconds are predicted, and None where nothing was."""

    name: str
    cuts: tuple[str, str]
    bytes: tuple[int, int]
    """Rows to it and sums of its gradients, in one step."""
    seconds: tuple[float | None, float | None]


@dataclass(frozen=True)
class PlanDifference:
    """From the first plan to the second."""

    names: tuple[str, str]
    stages: tuple[StageDifference, ...]
    """Those that are cut or paid differently."""
    compared: int
    """Stages that both have."""
    bytes: tuple[int, int]
    seconds: tuple[float | None, float | None]
    """Of a whole step."""

    @property
    def cut_differently(self) -> int:
        """Stages that have another cut."""
        return sum(stage.cuts[0] != stage.cuts[1] for stage in self.stages)


def difference_of(first: Outline, second: Outline, names: tuple[str, str]) -> PlanDifference:
    """Stages by their names; one that only one of them has is left out."""
    others = {stage.name: stage for stage in second.stages}
    both = [(stage, others[stage.name]) for stage in first.stages if not stage.is_input and stage.name in others]
    told = []
    for stage, other in both:
        sent = _sent(first, stage), _sent(second, other)
        seconds = _seconds(stage), _seconds(other)
        if stage.cut != other.cut or sent[0] != sent[1]:
            told.append(StageDifference(stage.name, (stage.cut or "1", other.cut or "1"), sent, seconds))
    return PlanDifference(
        names=names,
        stages=tuple(told),
        compared=len(both),
        bytes=(first.row_bytes + first.gradient_bytes, second.row_bytes + second.gradient_bytes),
        seconds=(first.step_seconds, second.step_seconds),
    )


def _sent(outline: Outline, stage: OutlineStage) -> int:
    return outline.rows_into(stage.name) + stage.gradient_bytes


def _seconds(stage: OutlineStage) -> float | None:
    if stage.compute_seconds is None:
        return None
    return stage.compute_seconds + (stage.communication_seconds or 0.0)
