"""Compression of what replicas send, with error feedback: what a message left out is added to the next one.

    codecs.py      bf16, int8, topk, sign: a flat tensor <-> a payload of bytes. Pure.
    residual.py    what was not sent yet
    hook.py        the mean over ranks, as a communication hook of DistributedDataParallel
    packing.py     a list of tensors as the buffers of one message
    meeting.py     two replicas meet in the middle
    averaging.py   the same for a list of tensors, in buckets
    options.py     what an exchange can be told about it

With DistributedDataParallel:

    ddp.register_comm_hook(shoal.compression.HookState("int8"), shoal.compression.hook)
"""

from shoal.exchanging.compression.codecs import Codec, make_codec
from shoal.exchanging.compression.hook import HookState, hook
from shoal.exchanging.compression.residual import Residual

__all__ = ["hook", "HookState", "Codec", "make_codec", "Residual"]
