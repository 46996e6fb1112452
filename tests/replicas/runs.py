"""Runs that tests conduct."""

from shoal.config import TrainConfig
from shoal.exchanges import ExchangeOptions
from shoal.training.listener import About
from shoal.training.numbering import samples_per_number


def about_a_run(config: TrainConfig, options: ExchangeOptions, steps_per_epoch: int = 10, *, lacking: int = 0) -> About:
    """What a run with these settings would be about, of a network and data that nobody needs.

    `lacking`: samples that the last batch of an epoch has less than others; `last_batch` must be keep then.
    """
    return About(
        model="net",
        parameters=1,
        data="digits",
        train_samples=max(config.samples_per_step, steps_per_epoch * samples_per_number(config)) - lacking,
        test_samples=8,
        classes=10,
        origin="here",
        epochs=config.epochs,
        steps_per_epoch=steps_per_epoch,
        batch=config.batch,
        workers=config.workers,
        plan=config.plan,
        plan_in_words=None,
        searched=False,
        replicas=config.replicas,
        exchange=options.name,
        device="cpu",
        threads=1,
        timeout=config.timeout,
        survives=options.survives,
        done=0,
    )
