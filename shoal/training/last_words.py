"""What a rank can still save after another was lost, so that no step is trained on again.

A step that failed has changed no weight: gradients are summed before the optimizer steps, and nothing is sent after.
What a forward pass changes, buffers such as the statistics of batch norm and the random state, is kept after every
step. So a rank that holds every tensor whole, as under the plan `data`, has all of the run as it was after its last
step; of several such ranks one may be a step further, and any of them can be gone on from.

What is lost for good is the lost rank's share of the losses since the last line of metrics: the run tells of how many
steps.
"""

import time
from dataclasses import replace

import torch

from shoal.launching import Failure, offer
from shoal.training.checkpoints.folder import Draft, new_token
from shoal.training.checkpoints.job_state import keep_random_state, put_random_state, take_snapshot, write_snapshot
from shoal.training.checkpoints.progress import Progress
from shoal.training.checkpoints.saving import content_of_state, write_state
from shoal.training.job import Job
from shoal.training.metrics import length_of_whole_lines
from shoal.training.run_folder import RunFolder


class LastWords:
    """Of one rank of several. Costs a copy of the buffers and of the random state for every step."""

    def __init__(self, job: Job, folder: RunFolder) -> None:
        self._job, self._folder = job, folder
        parameters = {name for name, _ in job.network.module.named_parameters()}
        held = job.network.held()
        self._whole = all(part.place is not None and part.place.is_whole for part in held.values())
        self._buffers = {name: part.tensor for name, part in held.items() if name not in parameters}
        self._before = {name: tensor.detach().clone() for name, tensor in self._buffers.items()}
        self._random = keep_random_state(job.device)
        self._stepped = time.time()
        self._known = 0.0, 0

    def step_done(self) -> None:
        """Keep what the next step changes before it can be known whether it fails."""
        for name, tensor in self._buffers.items():
            self._before[name].copy_(tensor.detach())
        self._random = keep_random_state(self._job.device)
        self._stepped = time.time()

    def know(self, losses: float, steps: int) -> None:
        """The sum of the losses of so many first steps of the epoch, over all ranks."""
        self._known = losses, steps

    def after(self, error: Exception, progress: Progress) -> None:
        """This rank ends with an error: where that is the loss of another, offer what it has, and save it if asked."""
        if Failure.of(error, self._job.network.rank).kind not in ("gone", "silent"):
            return
        lacks_epoch = progress.position.step == self._job.steps_per_epoch and self._known[1] == 0
        whole = self._whole and progress.steps > 0 and not lacks_epoch
        if offer(progress.steps, self._stepped, whole=whole):
            with self._folder.writing(self._folder.checkpoints.path):
                self._save(progress)

    def _save(self, progress: Progress) -> None:
        with torch.no_grad():
            for name, tensor in self._buffers.items():
                tensor.copy_(self._before[name])
        put_random_state(self._random, self._job.device)
        losses, steps = self._known
        lost = progress.summed[0] - steps
        length = length_of_whole_lines(self._folder.metrics)
        progress = replace(progress, summed=[steps, 0], metrics_length=length)
        snapshot = take_snapshot(self._job, everything=True)
        draft = Draft(self._folder.checkpoints, "last-words", new_token())
        write_snapshot(draft, snapshot, rank=0)
        content = content_of_state(self._job, progress, [[losses, 0.0]], snapshot)
        write_state(draft, {**content, "losses_lost": lost}, progress.step_seconds)
        draft.commit(progress.steps)
        self._folder.checkpoints.keep(self._job.config.keep)
