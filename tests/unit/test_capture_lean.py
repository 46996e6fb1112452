"""What a capture spares torch changes no graph, and torch is as it was afterwards."""

import gc
from contextlib import nullcontext

import pytest
import torch
from torch.export import _trace
from torch.fx import _lazy_graph_module, proxy
from torch.fx.experimental import proxy_tensor

from shoal import zoo
from shoal.capturing import capture, export
from shoal.capturing.lean import lean
from shoal.graph import same_graph


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["resnet18", "unet"])
def test_the_same_graph(monkeypatch: pytest.MonkeyPatch, name: str, training: bool) -> None:
    model = zoo.build(name, options={"classes": 3, "input": (3, 32, 32)}).train(training)
    x = torch.zeros(2, 3, 32, 32)
    found = capture(model, x)
    monkeypatch.setattr(export, "lean", nullcontext)
    assert same_graph(capture(model, x), found) is None


def test_torch_is_left_as_it_was() -> None:
    def now() -> list[object]:
        replaced = [(proxy, "CapturedTraceback"), (_trace, "_replace_unbacked_bindings")]
        replaced += [(proxy_tensor, name) for name in ("_extract_tensor_metadata", "track_tensor_tree")]
        found = [getattr(owner, name) for owner, name in replaced]
        return [gc.isenabled(), _lazy_graph_module._use_lazy_graph_module_flag, *found]

    before = now()
    with lean():
        assert all(one != other for one, other in zip(now(), before, strict=True))
    assert now() == before
    with pytest.raises(ValueError, match="within"), lean():
        raise ValueError("within")
    assert now() == before


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with lean():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
