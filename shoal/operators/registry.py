"""Which rule serves which operator."""

from collections.abc import Mapping
from typing import Any

import torch

from shoal.graph import LayerGraph
from shoal.operators import elementwise, losses, norms, products, views, windows
from shoal.operators.base import Axis, Facts, Need, Op, Operator, Part, Rule, Whole
from shoal.partition import volume

_ELEMENTWISE = """
    ceil eq floor ge gt isfinite isinf isnan le logical_and logical_not logical_or logical_xor lt masked_fill ne neg
    round rsub sign sub trunc where
"""
_SAVE_INPUT = """
    abs addcdiv addcmul atan atan2 celu clamp clamp_max clamp_min cos cosh div elu erf erfc fmod gelu hardshrink
    hardsigmoid hardswish hardtanh leaky_relu lerp log log10 log1p log2 log_sigmoid maximum minimum mish mul
    nan_to_num pow relu6 remainder selu sgn silu sin sinc sinh softplus softshrink square threshold _prelu_kernel
"""
_SAVE_OUTPUT = "exp exp2 expm1 reciprocal rsqrt sigmoid sqrt tan tanh"

_KNOWN: dict[str, Facts] = {
    # of every element alone
    **{word: elementwise.Elementwise() for word in _ELEMENTWISE.split()},
    **{word: elementwise.SavesInput() for word in _SAVE_INPUT.split()},
    **{word: elementwise.SavesOutput() for word in _SAVE_OUTPUT.split()},
    **{word: elementwise.Copy() for word in ["clone", "contiguous", "empty_like", "ones_like", "zeros_like"]},
    **{word: elementwise.Cast() for word in ["to", "_to_copy"]},
    "relu": elementwise.Relu(),
    "add": elementwise.Add(),
    "alias": elementwise.Alias(),
    "detach": elementwise.Detach(),
    "copy": elementwise.Overwrite(),
    "lift_fresh_copy": elementwise.Constant(),
    "prelu": elementwise.PerChannel(),
    **{word: elementwise.Made() for word in ["empty", "zeros", "ones", "full"]},
    # random masks
    "dropout": elementwise.Dropout(),
    "feature_dropout": elementwise.FeatureDropout(),
    "native_dropout": elementwise.NativeDropout(),
    **{word: elementwise.Dropping() for word in ["alpha_dropout", "feature_alpha_dropout"]},
    "bernoulli": elementwise.Mask(),
    # views and rows
    **{word: views.Reshape() for word in ["reshape", "flatten", "unsqueeze", "_unsafe_view", "unflatten"]},
    "view": views.View(),
    "squeeze": views.Squeeze(),
    **{word: views.Permute() for word in ["permute", "transpose", "t"]},
    "select": views.Select(),
    "unbind": views.Unbind(),
    **{word: views.Choose() for word in ["slice", "split", "split_with_sizes", "chunk"]},
    "expand": views.Expand(),
    "cat": views.Concat(),
    "pad": views.Pad(),
    "constant_pad_nd": views.Pad(),
    "flip": views.Flip(),
    **{word: views.PerhapsView() for word in ["type_as", "atleast_1d", "atleast_2d", "atleast_3d"]},
    **{word: views.PerhapsView() for word in ["broadcast_tensors", "meshgrid", "conj_physical", "sum_to_size"]},
    **{word: views.PerhapsView() for word in ["unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"]},
    **{word: views.Scatter() for word in ["slice_scatter", "select_scatter"]},
    # windows
    **{f"conv{dims}d": windows.Convolution() for dims in (1, 2, 3)},
    **{f"conv_transpose{dims}d": windows.TransposedConvolution() for dims in (1, 2, 3)},
    **{f"max_pool{dims}d": windows.MaxPool(dims) for dims in (1, 2, 3)},
    **{f"avg_pool{dims}d": windows.AveragePool(dims) for dims in (1, 2, 3)},
    **{f"adaptive_avg_pool{dims}d": windows.AdaptiveAveragePool(dims) for dims in (1, 2, 3)},
    **{f"adaptive_max_pool{dims}d": windows.AdaptiveMaxPool() for dims in (1, 2, 3)},
    **{f"max_pool{dims}d_with_indices": windows.MaxPoolFacts(dims) for dims in (2, 3)},
    **{f"upsample_nearest{dims}d": windows.NearestUpsample() for dims in (1, 2, 3)},
    **{f"_upsample_nearest_exact{dims}d": windows.NearestUpsample() for dims in (1, 2, 3)},
    **{word: windows.Upsample() for word in ["upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"]},
    "pixel_shuffle": windows.PixelShuffle(),
    "pixel_unshuffle": windows.PixelUnshuffle(),
    # products and sums
    "linear": products.Linear(),
    **{word: products.Matrices("self") for word in ["matmul", "mm", "bmm", "mv"]},
    "addmm": products.Matrices("mat1"),
    "baddbmm": products.Matrices("batch1"),
    "einsum": products.Einsum(),
    "scaled_dot_product_attention": products.Attention(),
    **{f"_scaled_dot_product_{kind}attention{where}": products.AttentionFacts() for kind, where in [
        ("flash_", ""), ("flash_", "_for_cpu"), ("efficient_", ""), ("cudnn_", ""), ("", "_math"),
    ]},
    **{word: products.Recurrent() for word in ["lstm", "gru", "rnn_tanh", "rnn_relu"]},
    "mean": products.Mean(),
    "sum": products.Sum(),
    # norms
    "batch_norm": norms.BatchNorm(),
    "_native_batch_norm_legit": norms.BatchNorm(),
    "_native_batch_norm_legit_functional": norms.FunctionalBatchNorm(),
    "_native_batch_norm_legit_no_training": norms.FixedBatchNorm(),
    "group_norm": norms.GroupNorm(),
    "instance_norm": norms.InstanceNorm(),
    "layer_norm": norms.LayerNorm(),
    "softmax": norms.Softmax(),
    "log_softmax": norms.LogSoftmax(),
    **{word: norms.SoftmaxFacts() for word in ["_softmax", "_log_softmax"]},
    # losses
    "cross_entropy_loss": losses.CrossEntropy(),
    **{word: losses.ScoreLoss() for word in ["nll_loss_nd", "nll_loss"]},
    **{word: losses.PairLoss() for word in ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"]},
}  # fmt: skip
"""Operators of aten by their word. What is no `Rule` has facts alone, and runs whole."""
WHOLE = Whole()
_UNKNOWN = Facts()


def words_with_rules() -> frozenset[str]:
    """The operators that can be cut."""
    return frozenset(word for word, known in _KNOWN.items() if isinstance(known, Rule))


def facts_of(operator: str) -> Facts:
    """What is known of an operator such as `aten.conv2d.default`; of one that writes in place, what its twin has."""
    namespace, _, rest = operator.partition(".")
    word = rest.partition(".")[0]
    if namespace != "aten":  # an operator of somebody else's may have the same word
        return _UNKNOWN
    return _KNOWN.get(word) or _KNOWN.get(word.removesuffix("_"), _UNKNOWN)


def draws(operator: Operator, arguments: Mapping[str, Any]) -> bool:
    """Whether an operator, called so, draws random numbers."""
    return torch.Tag.nondeterministic_seeded in operator.tags and facts_of(str(operator)).draws(arguments)


def learning(graph: LayerGraph) -> frozenset[str]:
    """Layers from which a gradient of the result can come back: it stops at `detach` and at whole numbers."""
    reached = set(graph.outputs)
    for layer in reversed(graph.layers):
        if layer.name in reached and layer.output.differentiable and not facts_of(layer.op).detaches:
            reached.update(layer.reads)
        else:
            reached.discard(layer.name)
    return frozenset(reached - graph.inputs.keys())


def rule_for(op: Op) -> Rule:
    """The rule of an operator; `WHOLE` where there is none for it or for the way it is called."""
    if "rule" not in op.worked_out:
        op.worked_out["rule"] = _rule_for(op)
    rule: Rule = op.worked_out["rule"]
    return rule


def axes_of(op: Op) -> tuple[Axis, ...]:
    """The directions in which a layer may be cut, worked out once."""
    if "axes" not in op.worked_out:
        op.worked_out["axes"] = rule_for(op).axes(op)
    axes: tuple[Axis, ...] = op.worked_out["axes"]
    return axes


def answers(op: Op, rule: Rule, part: Part) -> tuple[Mapping[str, Need], int]:
    """What a part reads, and how many elements it writes.

    A layer remembers what it last answered, about this very part: a search asks for its costs, then for its time.
    """
    last: tuple[Part, Rule, Mapping[str, Need], int] | None = op.worked_out.get("answers")
    if last is None or last[0] is not part or last[1] is not rule:
        last = op.worked_out["answers"] = part, rule, rule.needs(op, part), volume(rule.writes(op, part))
    return last[2], last[3]


def _rule_for(op: Op) -> Rule:
    rule = facts_of(op.layer.op)
    if not isinstance(rule, Rule) or not all(map(all, [op.out, *op.shapes.values()])):
        return WHOLE  # nothing to cut where there are no elements
    return rule if rule.speaks_of(op) else WHOLE
