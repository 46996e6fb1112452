"""What the numbers say, in sentences: which strategy is fastest, by how much, and why. Pure; every word is computed."""

from collections.abc import Iterator, Sequence

from shoal.outline import Outline
from shoal.reporting.figures import DDP, Figures, fastest_first, figures_of, target_of
from shoal.reporting.records import RunRecord, Study
from shoal.result import RunResult
from shoal.units import show_bytes, show_seconds

NEAR = 0.03
"""Of two times that differ by less than this share neither is called faster."""
WORTH_TELLING = 0.05
"""Shares of a step below this are not told as a reason."""


def headline(study: Study) -> str:
    """The answer in one sentence."""
    alone = study.alone
    if alone is not None:
        return _of_one(alone)
    figures, target = figures_of(study), target_of(study)
    ranked = fastest_first(figures)
    if target is None or not ranked:
        done = sum(each.finished for each in figures)
        asked = sum(each.asked for each in figures)
        if done == 0:
            return f"No run of {asked} has finished yet."
        return f"{done} of {asked} runs have finished; no strategy reaches {_accuracy(target)} with all its seeds."
    best, *others = ranked
    assert best.to_target is not None
    told = f"{best.name} reaches {_accuracy(target)} in {show_seconds(best.to_target.median)}"
    return f"{told}{_beside(best, others)}."


def _beside(best: Figures, others: Sequence[Figures]) -> str:
    """How the fastest stands to the next one, and to DDP where that is another."""
    if not others:
        return ", the only strategy to get there" if best.asked else ""
    parts = [_ratio(best, others[0])]
    ddp = next((each for each in others[1:] if each.name == DDP), None)
    if ddp is not None:
        parts.append(_ratio(best, ddp))
    return ", " + " and ".join(parts)


def _ratio(best: Figures, other: Figures) -> str:
    assert best.to_target is not None
    assert other.to_target is not None
    times = other.to_target.median / max(best.to_target.median, 1e-9)
    if times < 1 + NEAR or (len(best.to_target.values) > 1 and best.to_target.overlaps(other.to_target)):
        return f"level with {other.name} ({show_seconds(other.to_target.median)})"
    return f"{times:.{1 if times < 10 else 0}f} times as fast as {other.name}"


def _of_one(run: RunRecord) -> str:
    result = run.result
    if result is None:
        return f"The run {run.name} is {'not finished' if run.state == 'unfinished' else run.state}: {run.why}."
    score = (
        f"{result.test_accuracy:.1%} test accuracy"
        if result.test_iou is None
        else f"a foreground IoU of {result.test_iou:.3f}"
    )
    return f"{result.model} reaches {score} on {result.data} in {show_seconds(result.wall_seconds)}."


def _accuracy(target: float | None) -> str:
    return "an accuracy" if target is None else f"{target:.1%}".replace(".0%", "%")


def reasons(study: Study) -> list[str]:
    """Why it is so: the largest differences between the fastest and the next, then what else is worth knowing."""
    alone = study.alone
    if alone is not None:
        return [] if alone.result is None else list(_facts(alone, alone.result))
    figures = figures_of(study)
    ranked = fastest_first(figures)
    told: list[str] = []
    if len(ranked) > 1:
        told += _compared(study, ranked[0], ranked[1])
        ddp = next((each for each in ranked[2:] if each.name == DDP), None)
        if ddp is not None:
            told += _compared(study, ranked[0], ddp)
    arrived = {each.name for each in ranked}
    target = _accuracy(target_of(study))
    for each in figures:
        if each.finished < each.asked:
            told.append(f"{each.name}: {each.asked - each.finished} of {_runs(each.asked)} did not finish; see below.")
        elif each.name not in arrived:
            told.append(f"{each.name} reaches {target} with {each.reached} of {each.finished} seeds.")
    if len(ranked) > 1 and not study.turns and all(each.asked == 1 for each in figures):
        told.append("Each strategy ran once: a difference of some percent may be chance.")
    return list(dict.fromkeys(told))


def _runs(count: int) -> str:
    return f"{count} run{'' if count == 1 else 's'}"


def _compared(study: Study, fast: Figures, slow: Figures) -> Iterator[str]:
    """Time is samples times seconds per sample: which of them differs, and what a step is made of."""
    if fast.step_seconds is not None and slow.step_seconds is not None:
        how = ", timed in turns" if fast.in_turns and slow.in_turns else ""
        yield (
            f"A step takes {show_seconds(fast.step_seconds.median)} with {fast.name} and "
            f"{show_seconds(slow.step_seconds.median)} with {slow.name}{how}."
        )
    if fast.samples_to_target is not None and slow.samples_to_target is not None:
        here, there = f"{fast.samples_to_target.median:,.0f}", f"{slow.samples_to_target.median:,.0f}"
        if here == there:
            yield f"{fast.name} and {slow.name} see as many samples until the target: {here}."
        else:
            yield f"Until the target {fast.name} sees {here} samples, {slow.name} {there}."
    if fast.bytes_counted is not None and slow.bytes_counted is not None:
        sent = show_bytes(slow.bytes_counted), show_bytes(fast.bytes_counted)
        yield f"{slow.name} sends {sent[0]} per step, {fast.name} {sent[1]}."
    for each in (slow, fast):
        if each.waiting is not None and each.waiting >= WORTH_TELLING:
            yield f"Replicas of {each.name} spend {each.waiting:.0%} of their time in the exchange."
    for each in (slow, fast):
        outline = outline_of_strategy(study, each.name)
        if outline is not None:
            yield from _largest_terms(each.name, outline)


def outline_of_strategy(study: Study, name: str) -> Outline | None:
    """How a strategy cuts the network: of the first of its runs that tells."""
    return next((run.outline for run in study.of(name) if run.outline is not None), None)


def _largest_terms(name: str, outline: Outline) -> Iterator[str]:
    """What the prediction says a step is made of."""
    if outline.step_seconds is None:
        return
    terms = [
        (seconds, f"{what} {stage.name}")
        for stage in outline.stages
        for seconds, what in ((stage.compute_seconds, "computing"), (stage.communication_seconds, "communication of"))
        if seconds is not None and seconds >= WORTH_TELLING * outline.step_seconds
    ]
    if terms:
        named = [f"{what} {show_seconds(seconds)}" for seconds, what in sorted(terms, reverse=True)[:3]]
        yield f"Largest terms of {name}, predicted: {', '.join(named)} of {show_seconds(outline.step_seconds)}."


def _facts(run: RunRecord, result: RunResult) -> Iterator[str]:
    each = result.samples // max(result.epochs, 1)
    yield (
        f"It trained {result.epochs} epoch{'' if result.epochs == 1 else 's'} of {each:,} samples at "
        f"{result.samples_per_second:,.0f} samples/s; a step takes {show_seconds(result.step_seconds_median)} (median)."
    )
    if result.step_seconds_predicted is not None:
        error = result.step_seconds_predicted / result.step_seconds_median - 1
        yield f"The cost model predicted {show_seconds(result.step_seconds_predicted)} for a step, {error:+.0%}."
    if result.best is not None and result.best.step < result.steps and result.test_iou is None:
        yield f"The best test was {result.best.test_accuracy:.1%}, in epoch {result.best.epoch}."
    if run.outline is not None:
        yield from _largest_terms(result.plan, run.outline)
    scored = {name: score.accuracy for name, score in result.per_class.items() if score.accuracy is not None}
    if len(scored) > 1:
        worst, best = (pick(scored, key=lambda name: scored[name]) for pick in (min, max))
        shares = f"{scored[best]:.1%}", f"{scored[worst]:.1%}"
        yield f"Of {len(scored)} classes {best} is found best ({shares[0]}) and {worst} worst ({shares[1]})."
