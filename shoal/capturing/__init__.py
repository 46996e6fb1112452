"""Capture: nn.Module -> LayerGraph, with torch.export."""

from shoal.capturing.export import capture, capture_call, capture_with_states

__all__ = ["capture", "capture_call", "capture_with_states"]
