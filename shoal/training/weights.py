"""The trained parameters and buffers alone, as a file that other programs read."""

import os
import re
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import nn

from shoal.inference import METADATA, Inference


def save_weights(module: nn.Module, path: Path, inference: Inference) -> None:
    """Write them, memory that is shared only once, and as metadata what they need to be used.

    An `OSError` where the system does not let it, as on a full disk.
    """
    try:
        save_model(module, str(path), {METADATA: inference.to_json()})
    except SafetensorError as error:
        if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from error
