"""The networks of docs/networks.md: from which package, with which options, on which batch.

Small ones of each family, with random weights. The images are small and odd where the network allows it, and large
enough that the last maps keep several pixels: batch norm over one value per sample multiplies rounding by millions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch import nn

CLASSES = 7


@dataclass(frozen=True)
class Network:
    """One row of the table."""

    family: str
    source: str
    """The package and the name of the network in it, such as `timm:resnet10t`; or a module and a class of it."""
    size: int = 64
    """Height and width of an image."""
    options: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 4
    frames: int | None = None
    """Number of images in a clip, for networks on video."""

    @property
    def key(self) -> str:
        """Names the row; the same network may be there with other options."""
        parts = [f"{name}={value!r}" for name, value in self.options.items()]
        return f"{self.source}({', '.join(parts)})" if parts else self.source

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the global batch."""
        clip = () if self.frames is None else (self.frames,)
        return (self.batch, 3, *clip, self.size, self.size)

    def build(self) -> nn.Module:
        """The network, its weights drawn from torch's generator. Needs the package."""
        package, name = self.source.split(":")
        if package in _BUILDERS:
            return _BUILDERS[package](name, dict(self.options))
        if package.split(".")[0] in ("timm", "torchvision"):
            import_torchvision()
        model: nn.Module = getattr(import_module(package), name)(num_classes=CLASSES, **self.options)
        return model


def _timm(name: str, options: dict[str, Any]) -> nn.Module:
    import_torchvision()
    classes = {} if options.get("features_only") else {"num_classes": CLASSES}
    model: nn.Module = import_module("timm").create_model(name, pretrained=False, **classes, **options)
    return model


def _torchvision(name: str, options: dict[str, Any]) -> nn.Module:
    import_torchvision()
    weights = {"weights": None, "num_classes": CLASSES}
    if name in _SEGMENTATION:
        weights["weights_backbone"] = None
    home = import_module("torchvision.models")
    model: nn.Module = home.get_model(name, **weights, **options)
    return model


def _fpn(name: str, options: dict[str, Any]) -> nn.Module:
    import_torchvision()
    utils = import_module("torchvision.models.detection.backbone_utils")
    make = utils.mobilenet_backbone if name.startswith("mobilenet") else utils.resnet_fpn_backbone
    extra = {"fpn": True} if name.startswith("mobilenet") else {}
    norm = {"norm_layer": nn.BatchNorm2d}  # its default is a frozen one
    model: nn.Module = make(
        backbone_name=name, weights=None, trainable_layers=5 + len(extra), **norm, **extra, **options
    )
    return model


def _smp(name: str, options: dict[str, Any]) -> nn.Module:
    import_torchvision()
    package = import_module("segmentation_models_pytorch")
    model: nn.Module = getattr(package, name)(encoder_weights=None, classes=CLASSES, **options)
    return model


_SEGMENTATION = ("fcn_resnet50", "deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")
_BUILDERS: dict[str, Callable[[str, dict[str, Any]], nn.Module]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "torchvision.fpn": _fpn,
    "smp": _smp,
}


def import_torchvision() -> None:
    """Import torchvision, also where its compiled operators do not load.

    A build for CUDA beside torch for CPUs has none, and then fails when it describes two of them. No network here
    uses them, so it is enough that their names exist.
    """
    try:
        import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        library = import_module("torch.library").Library("torchvision", "FRAGMENT")
        _KEPT.append(library)
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import_module("torchvision")


_KEPT: list[Any] = []
"""A library's names end with it."""


def _of(
    family: str, source: str, size: int = 64, *, batch: int = 4, frames: int | None = None, **options: Any
) -> Network:
    return Network(family, source, size, options, batch, frames)


SMALL: dict[str, Any] = {"depths": (1, 1, 2, 1), "dims": (16, 32, 48, 64)}
MAXVIT: dict[str, Any] = {
    "input_size": (64, 64),
    "stem_channels": 16,
    "partition_size": 4,
    "block_channels": [16, 32],
    "block_layers": [1, 2],
    "head_dim": 8,
    "stochastic_depth_prob": 0.0,
}

NETWORKS: tuple[Network, ...] = (
    # torchvision, classification
    _of("SqueezeNet", "torchvision:squeezenet1_1", 65),
    _of("DenseNet", "torchvision.models:DenseNet", 75, growth_rate=8, block_config=(2, 3, 3, 2), num_init_features=16),
    _of("GoogLeNet", "torchvision:googlenet", 65, aux_logits=False, init_weights=False),
    _of("GoogLeNet", "torchvision:googlenet", 96, init_weights=False),
    _of("ShuffleNet v2", "torchvision:shufflenet_v2_x0_5", 75),
    _of("MobileNet v3", "torchvision:mobilenet_v3_small", 75),
    _of("MNASNet", "torchvision:mnasnet0_5", 75),
    _of("ResNeXt", "torchvision:resnext50_32x4d", 65),
    _of("EfficientNet", "torchvision:efficientnet_b0", 75),
    _of("EfficientNet v2", "torchvision:efficientnet_v2_s", 65),
    _of("RegNet X", "torchvision:regnet_x_400mf", 65),
    _of("RegNet Y", "torchvision:regnet_y_400mf", 65),
    _of("ConvNeXt", "torchvision:convnext_tiny", 64),
    _of("MaxViT", "torchvision.models:MaxVit", 64, **MAXVIT),
    # torchvision, video
    _of("ResNet 3D", "torchvision:r3d_18", 33, batch=2, frames=8),
    _of("R(2+1)D", "torchvision:r2plus1d_18", 33, batch=2, frames=8),
    # torchvision, segmentation and detection
    _of("FCN", "torchvision:fcn_resnet50", 65),
    _of("FCN", "torchvision:fcn_resnet50", 65, aux_loss=True),
    _of("DeepLab v3", "torchvision:deeplabv3_mobilenet_v3_large", 65),
    _of("DeepLab v3", "torchvision:deeplabv3_resnet50", 65),
    _of("LR-ASPP", "torchvision:lraspp_mobilenet_v3_large", 75),
    _of("FPN backbone", "torchvision.fpn:resnet18", 65),
    _of("FPN backbone", "torchvision.fpn:mobilenet_v3_large", 65),
    # segmentation-models-pytorch
    _of("U-Net", "smp:Unet", 64, encoder_name="timm-tf_efficientnet_lite0"),
    _of("U-Net++", "smp:UnetPlusPlus", 64, encoder_name="mobilenet_v2"),
    _of("MA-Net", "smp:MAnet", 64, encoder_name="resnet18"),
    _of("LinkNet", "smp:Linknet", 64, encoder_name="resnet18"),
    _of("FPN", "smp:FPN", 64, encoder_name="resnet18"),
    _of("PSPNet", "smp:PSPNet", 72, encoder_name="resnet18"),
    _of("PAN", "smp:PAN", 128, encoder_name="resnet18"),
    _of("DeepLab v3+", "smp:DeepLabV3Plus", 64, encoder_name="resnet18"),
    _of("UPerNet", "smp:UPerNet", 64, encoder_name="resnet18"),
    # timm, convolutional
    _of("ResNet-D", "timm:resnet10t", 75),
    _of("SE-ResNet", "timm:seresnet18", 65),
    _of("ECA-ResNet", "timm:ecaresnet26t", 65),
    _of("ResNet, blur pool", "timm:resnetblur18", 65),
    _of("ResNet-RS", "timm:resnetrs50", 65),
    _of("GCResNet", "timm:gcresnext26ts", 65),
    _of("SK-ResNet", "timm:skresnet18", 65),
    _of("Res2Net", "timm:res2net50_14w_8s", 65),
    _of("ResNeSt", "timm:resnest14d", 65),
    _of("ResNet v2", "timm:resnetv2_18d", 65),
    _of("BiT", "timm:resnetv2_50x1_bit", 65),
    _of("DPN", "timm:dpn48b", 65),
    _of("DLA", "timm:dla46_c", 64),
    _of("HRNet", "timm:hrnet_w18_small", 64),
    _of("VoVNet", "timm:ese_vovnet19b_slim_dw", 75),
    _of("CSPNet", "timm:cspresnet50", 65),
    _of("DarkNet", "timm:darknet17", 75),
    _of("GENet", "timm:gernet_s", 75),
    _of("RepVGG", "timm:repvgg_a0", 65),
    _of("MobileOne", "timm:mobileone_s0", 65),
    _of("SelecSLS", "timm:selecsls42", 75),
    _of("TResNet", "timm:tresnet_m", 64),
    _of("Xception", "timm:xception41", 65),
    _of("Xception", "timm:legacy_xception", 75),
    _of("Inception v4", "timm:inception_v4", 111),
    _of("Inception-ResNet v2", "timm:inception_resnet_v2", 111),
    _of("NASNet", "timm.models.nasnet:NASNetALarge", 75, num_features=384, stem_size=8),
    _of("PNASNet", "timm:pnasnet5large", 75),
    _of("RegNet Z", "timm:regnetz_b16", 65),
    _of("NFNet", "timm:dm_nfnet_f0", 64),
    _of("NF-ResNet", "timm:nf_resnet26", 65),
    _of("NF-RegNet", "timm:nf_regnet_b0", 65),
    _of("MixNet", "timm:mixnet_s", 65),
    _of("TinyNet", "timm:tinynet_e", 75),
    _of("FBNet", "timm:fbnetc_100", 65),
    _of("SPNASNet", "timm:spnasnet_100", 65),
    _of("HardCoRe-NAS", "timm:hardcorenas_a", 65),
    _of("LCNet", "timm:lcnet_035", 75),
    _of("PP-LCNet v2", "timm:lcnetv2_base", 65),
    _of("GhostNet v2", "timm:ghostnetv2_100", 64),
    _of("ReXNet", "timm:rexnet_100", 65),
    _of("MobileNet v1", "timm:mobilenetv1_100", 65),
    _of("MobileNet v4", "timm:mobilenetv4_conv_small_035", 75),
    _of("HGNet", "timm:hgnetv2_b0", 65),
    _of("RDNet", "timm:rdnet_tiny", 64),
    _of("ConvMixer", "timm.models.convmixer:ConvMixer", 63, dim=24, depth=3),
    _of("ConvNeXt", "timm:convnext_atto", 64, **SMALL),
    _of("ConvNeXt v2", "timm:convnextv2_atto", 64, **SMALL),
    _of("InceptionNeXt", "timm:inception_next_atto", 64, **SMALL),
    _of("FasterNet", "timm:fasternet_t0", 64),
    _of("StarNet", "timm:starnet_s050", 65),
    _of("RepViT", "timm:repvit_m0_9", 64),
    _of("MambaOut", "timm:mambaout_femto", 64, **SMALL),
    _of("PoolFormer", "timm:poolformer_s12", 64),
    _of("ConvFormer", "timm:convformer_s18", 64),
    _of("FocalNet", "timm.models.focalnet:FocalNet", 64, depths=(1, 1, 2, 1), embed_dim=24),
    _of("LambdaResNet", "timm:lambda_resnet26t", 64),
    # timm, with attention beside the convolutions
    _of("EdgeNeXt", "timm:edgenext_xx_small", 64),
    _of("MobileViT", "timm:mobilevit_xxs", 64),
    _of("MobileViT v2", "timm:mobilevitv2_050", 64),
    _of("EfficientFormer v2", "timm:efficientformerv2_s0", 64, img_size=64),
    _of("EfficientViT (MIT)", "timm:efficientvit_b0", 64),
    _of("EfficientViT (MSRA)", "timm:efficientvit_m0", 64, img_size=64),
    _of("FastViT", "timm:fastvit_t8", 64),
    _of("NextViT", "timm:nextvit_small", 64),
    _of("SwiftFormer", "timm:swiftformer_xs", 64),
    _of("SHViT", "timm:shvit_s1", 128),
    _of("LeViT", "timm:levit_conv_128s", 64, img_size=64),
    _of("CoAtNet", "timm:coatnet_pico_rw_224", 64, img_size=64),
    _of("TinyViT", "timm:tiny_vit_5m_224", 64),
    _of("Visformer", "timm:visformer_tiny", 64, img_size=64),
    _of("BoTNet", "timm:botnet26t_256", 64, img_size=64),
    # timm, the maps of all stages
    _of("ResNet", "timm:resnet18", 65, features_only=True),
    _of("MobileNet v3", "timm:mobilenetv3_small_050", 65, features_only=True),
    _of("HRNet", "timm:hrnet_w18_small", 64, features_only=True),
)
