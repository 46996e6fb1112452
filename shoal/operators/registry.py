"""Which rule serves which operator."""

from shoal.operators import elementwise, losses, norms, products, views, windows
from shoal.operators.base import Op, Rule, Whole

_ELEMENTWISE = """
    abs add addcdiv addcmul alias atan atan2 ceil celu clamp clamp_max clamp_min clone contiguous cos cosh detach
    div elu empty_like eq erf erfc exp exp2 expm1 floor fmod ge gelu gt hardshrink hardsigmoid hardswish hardtanh
    isfinite isinf isnan le leaky_relu lerp lift_fresh_copy log log10 log1p log2 log_sigmoid logical_and logical_not
    logical_or logical_xor lt masked_fill maximum minimum mish mul nan_to_num ne neg ones_like pow reciprocal relu
    relu6 remainder round rsqrt rsub selu sgn sigmoid sign silu sin sinc sinh softplus softshrink sqrt square sub
    tan tanh threshold to trunc where zeros_like _to_copy
"""

_RULES: dict[str, Rule] = {
    **{word: elementwise.Elementwise() for word in _ELEMENTWISE.split()},
    **{word: elementwise.Made() for word in ["empty", "zeros", "ones", "full"]},
    **{word: elementwise.Dropout() for word in ["dropout", "native_dropout", "feature_dropout"]},
    "bernoulli": elementwise.Mask(),
    "prelu": elementwise.PerChannel(),
    "_prelu_kernel": elementwise.Elementwise(),
    **{
        word: views.Reshape()
        for word in ["view", "reshape", "flatten", "unsqueeze", "squeeze", "_unsafe_view", "unflatten"]
    },
    **{word: views.Permute() for word in ["permute", "transpose", "t"]},
    **{word: views.Choose() for word in ["slice", "select", "split", "split_with_sizes", "chunk"]},
    "expand": views.Expand(),
    "cat": views.Concat(),
    "pad": views.Pad(),
    "constant_pad_nd": views.Pad(),
    "flip": views.Flip(),
    **{word: windows.Convolution() for word in ["conv1d", "conv2d", "conv3d"]},
    **{word: windows.TransposedConvolution() for word in ["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]},
    **{word: windows.MaxPool() for word in ["max_pool1d", "max_pool2d", "max_pool3d"]},
    **{word: windows.AveragePool() for word in ["avg_pool1d", "avg_pool2d", "avg_pool3d"]},
    **{
        word: windows.AdaptiveAveragePool()
        for word in ["adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"]
    },
    **{
        word: windows.Upsample()
        for word in [
            "upsample_nearest1d",
            "upsample_nearest2d",
            "upsample_nearest3d",
            "_upsample_nearest_exact1d",
            "_upsample_nearest_exact2d",
            "_upsample_nearest_exact3d",
            "upsample_linear1d",
            "upsample_bilinear2d",
            "upsample_trilinear3d",
        ]
    },
    "pixel_shuffle": windows.PixelShuffle(),
    "pixel_unshuffle": windows.PixelUnshuffle(),
    "linear": products.Linear(),
    **{word: products.Reduce() for word in ["mean", "sum"]},
    **{
        word: norms.BatchNorm()
        for word in [
            "batch_norm",
            "_native_batch_norm_legit_functional",
            "_native_batch_norm_legit",
            "_native_batch_norm_legit_no_training",
        ]
    },
    "group_norm": norms.GroupNorm(),
    "instance_norm": norms.GroupNorm(),
    "layer_norm": norms.LayerNorm(),
    **{word: norms.Softmax() for word in ["softmax", "log_softmax"]},
    **{word: losses.ScoreLoss() for word in ["cross_entropy_loss", "nll_loss_nd", "nll_loss"]},
    **{word: losses.PairLoss() for word in ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"]},
}
WHOLE = Whole()


def rule_for(op: Op) -> Rule:
    """The rule of an operator; `WHOLE` where there is none for it or for the way it is called."""
    if "rule" not in op.found:
        op.found["rule"] = _rule_for(op)
    found: Rule = op.found["rule"]
    return found


def _rule_for(op: Op) -> Rule:
    word = op.layer.op.split(".")[1]
    rule = _RULES.get(word, WHOLE)
    if rule is WHOLE or not all(map(all, [op.out, *op.shapes.values()])):  # nothing to cut where there are no elements
        return WHOLE
    return WHOLE if _unusual(word, op) else rule


def _unusual(word: str, op: Op) -> bool:
    """Ways of calling an operator that its rule does not speak of."""
    overload = op.layer.op.split(".", 2)[2]
    if word.startswith(("conv", "max_pool", "avg_pool", "adaptive_avg_pool")) and word[-1] == "d":
        return len(op.out) != int(word[-2]) + 2  # without a batch dim
    if "upsample" in word:
        return overload != "vec"
    if word in ("pixel_shuffle", "pixel_unshuffle"):
        return len(op.out) != 4
    if word in (
        "native_dropout",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_functional",
        "_native_batch_norm_legit_no_training",
    ):
        return op.layer.result not in (None, 0)
    if word == "bernoulli":
        return overload != "p"  # the probabilities are a tensor
    if word == "view":
        return overload != "default"  # as another type
    if word == "to":
        return overload == "other"
    if word == "instance_norm":
        return "running_mean" in op.shapes
    if word in ("mean", "sum", "softmax", "log_softmax"):
        return op.layer.arguments.get("dtype") is not None or not op.shapes["self"]
    if word in ("cross_entropy_loss", "nll_loss_nd", "nll_loss"):
        of_numbers = len(op.shapes["target"]) == len(op.shapes["self"]) - 1 > 0
        return not of_numbers or op["reduction"] != losses.EACH
    if word in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        return op.shapes["self"] != op.shapes["target"] or op["reduction"] != losses.EACH
    if word == "prelu":
        return len(op.out) < 2
    return False
