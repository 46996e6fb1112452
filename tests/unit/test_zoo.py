"""The zoo builds the published networks, at any size that they can take, and refuses the rest in words."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal.zoo
from shoal.errors import DataError, ModelError

PUBLISHED = {
    "lenet5": 61_706,
    "alexnet": 61_100_840,
    "vgg16": 138_357_544,
    "inception_v3": 23_834_568,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "mobilenet_v2": 3_504_872,
}

DEFAULTS = {
    "lenet5": ((1, 28, 28), (10,)),
    "alexnet": ((3, 224, 224), (1000,)),
    "vgg16": ((3, 224, 224), (1000,)),
    "inception_v3": ((3, 299, 299), (1000,)),
    "resnet18": ((3, 224, 224), (1000,)),
    "resnet50": ((3, 224, 224), (1000,)),
    "mobilenet_v2": ((3, 224, 224), (1000,)),
    "unet": ((1, 1024, 1024), (2, 1024, 1024)),
    "acoustic": ((1, 40, 96), (10,)),
}

SMALL = {
    "lenet5": (1, 8, 8),
    "alexnet": (2, 63, 65),
    "vgg16": (2, 32, 33),
    "inception_v3": (2, 75, 77),
    "resnet18": (2, 33, 32),
    "resnet50": (2, 33, 32),
    "mobilenet_v2": (2, 33, 32),
    "unet": (2, 16, 32),
    "acoustic": (1, 13, 9),
}

SMALLEST = {
    "lenet5": (4, 4),
    "alexnet": (63, 63),
    "vgg16": (32, 32),
    "inception_v3": (75, 75),
    "unet": (16, 16),
    "acoustic": (12, 7),
}

every_network = pytest.mark.parametrize("name", shoal.zoo.names())


pytestmark = pytest.mark.usefixtures("one_thread")


def on_meta(name: str, **options: object) -> nn.Module:
    """A zoo network without memory behind its parameters: shapes only."""
    factory: Callable[..., nn.Module] = getattr(shoal.zoo, name)
    with torch.device("meta"):
        return factory(**options)


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# --- sizes and shapes


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name: str) -> None:
    assert parameter_count(on_meta(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "lenet5"])
def test_parameter_count_does_not_depend_on_the_extents(name: str) -> None:
    shape = (3, *SMALL[name][1:])
    assert parameter_count(on_meta(name, input=shape)) == PUBLISHED[name]


@every_network
def test_defaults_are_the_published_ones(name: str) -> None:
    shape, output = DEFAULTS[name]
    model = on_meta(name).eval()
    assert model(torch.empty(2, *shape, device="meta")).shape == (2, *output)


@every_network
def test_input_and_classes_set_the_ends(name: str) -> None:
    channels, *extents = SMALL[name]
    model = on_meta(name, input=SMALL[name], classes=7).eval()
    scores = model(torch.empty(3, channels, *extents, device="meta"))
    assert scores.shape == ((3, 7, *extents) if name == "unet" else (3, 7))


@pytest.mark.parametrize("size", [4, 5, 8, 12, 19, 20, 28, 31, 32, 33, 64])
def test_lenet_follows_its_input(size: int) -> None:
    model = shoal.zoo.lenet5(input=(3, size, 28), classes=4)
    assert model(torch.zeros(2, 3, size, 28)).shape == (2, 4)


def test_lenet_reads_padded_digits_and_the_original_size_alike() -> None:
    assert parameter_count(shoal.zoo.lenet5(input=(1, 32, 32))) == PUBLISHED["lenet5"]


@pytest.mark.parametrize("frames", [7, 8, 14, 15, 50, 96, 101])
def test_acoustic_takes_any_length(frames: int) -> None:
    model = shoal.zoo.acoustic(input=(1, 40, frames))
    assert model(torch.zeros(2, 1, 40, frames)).shape == (2, 10)


def test_unet_in_three_dimensions() -> None:
    model = shoal.zoo.unet(input=(2, 4, 8, 12), classes=3, width=4, depth=2)
    scores = model(torch.randn(2, 2, 4, 8, 12))
    scores.sum().backward()
    assert scores.shape == (2, 3, 4, 8, 12)
    assert {type(m) for m in model.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)} == {nn.Conv3d}


def test_unet_width_and_depth() -> None:
    model = shoal.zoo.unet(input=(1, 32, 32), width=8, depth=3)
    weights = model.state_dict()
    assert weights["encoder.0.0.weight"].shape == (8, 1, 3, 3)
    assert weights["bottleneck.3.weight"].shape == (64, 64, 3, 3)
    assert weights["up.0.weight"].shape == (64, 32, 2, 2)
    assert weights["decoder.2.0.weight"].shape == (8, 16, 3, 3)
    assert weights["head.weight"].shape == (2, 8, 1, 1)


# --- training


@every_network
def test_every_parameter_gets_a_finite_gradient(name: str) -> None:
    torch.manual_seed(0)
    factory: Callable[..., nn.Module] = getattr(shoal.zoo, name)
    model = factory(input=SMALL[name], classes=5).train()
    scores = model(torch.randn(2, *SMALL[name]))
    target = torch.randint(5, (scores.shape[0], *scores.shape[2:]))
    loss = nn.functional.cross_entropy(scores, target)
    paths, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters)  # refuses a parameter that takes no part
    assert [path for path, grad in zip(paths, gradients, strict=True) if not grad.isfinite().all()] == []


@every_network
def test_export_captures_it_in_training(name: str) -> None:
    model = on_meta(name, input=SMALL[name], classes=5).train()
    program = torch.export.export(model, (torch.empty(2, *SMALL[name], device="meta"),))
    captured = {spec.target for spec in program.graph_signature.input_specs if spec.kind.name == "PARAMETER"}
    assert captured == dict(model.named_parameters()).keys()


@every_network
def test_no_module_is_called_twice(name: str) -> None:
    """A plan speaks of layers by their path, so one path must mean one place in the network."""
    model = on_meta(name, input=SMALL[name]).eval()
    calls: dict[str, int] = {}

    def count(path: str) -> Callable[[object, object], None]:
        return lambda _module, _args: calls.update({path: calls.get(path, 0) + 1})

    for path, module in model.named_modules():
        module.register_forward_pre_hook(count(path))
    model(torch.empty(1, *SMALL[name], device="meta"))
    assert set(calls.values()) == {1}


# --- weights


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("lenet5", {"conv1.weight": (6, 1, 5, 5), "conv2.bias": (16,), "fc1.weight": (120, 400)}),
        ("alexnet", {"features.0.weight": (64, 3, 11, 11), "features.10.bias": (256,)}),
        ("alexnet", {"classifier.1.weight": (4096, 9216), "classifier.6.weight": (1000, 4096)}),
        ("vgg16", {"features.28.weight": (512, 512, 3, 3), "classifier.0.weight": (4096, 25088)}),
        ("vgg16", {"features.0.bias": (64,), "classifier.3.bias": (4096,), "classifier.6.bias": (1000,)}),
        ("resnet18", {"conv1.weight": (64, 3, 7, 7), "layer1.0.conv1.weight": (64, 64, 3, 3)}),
        ("resnet18", {"layer2.0.downsample.0.weight": (128, 64, 1, 1), "bn1.running_mean": (64,)}),
        ("resnet50", {"layer1.0.downsample.1.bias": (256,), "layer3.5.conv3.weight": (1024, 256, 1, 1)}),
        ("resnet50", {"layer4.2.bn3.running_var": (2048,), "fc.weight": (1000, 2048)}),
        ("mobilenet_v2", {"features.0.0.weight": (32, 3, 3, 3), "features.1.conv.0.0.weight": (32, 1, 3, 3)}),
        ("mobilenet_v2", {"features.1.conv.1.weight": (16, 32, 1, 1), "features.2.conv.3.bias": (24,)}),
        ("mobilenet_v2", {"features.18.0.weight": (1280, 320, 1, 1), "classifier.1.weight": (1000, 1280)}),
        ("inception_v3", {"Conv2d_1a_3x3.conv.weight": (32, 3, 3, 3), "Mixed_5b.branch1x1.bn.bias": (64,)}),
        ("inception_v3", {"Mixed_6b.branch7x7_2.conv.weight": (128, 128, 1, 7), "fc.bias": (1000,)}),
        ("inception_v3", {"Mixed_7c.branch3x3dbl_3b.conv.weight": (384, 384, 3, 1)}),
    ],
)
def test_weights_have_their_published_names(name: str, shapes: dict[str, tuple[int, ...]]) -> None:
    weights = on_meta(name).state_dict()
    assert {key: tuple(weights[key].shape) for key in shapes} == shapes


def test_number_of_published_entries() -> None:
    """Names of all entries together: nothing stateful was added to, or left out of, the published lists."""
    entries = {name: len(on_meta(name).state_dict()) for name in PUBLISHED}
    assert entries == {
        "lenet5": 10,
        "alexnet": 16,
        "vgg16": 32,
        "inception_v3": 566,
        "resnet18": 122,
        "resnet50": 320,
        "mobilenet_v2": 314,
    }


def test_starting_weights() -> None:
    torch.manual_seed(0)
    weights = shoal.zoo.mobilenet_v2(classes=100).state_dict()
    assert weights["features.18.0.weight"].std().item() == pytest.approx((2 / 1280) ** 0.5, rel=0.02)
    assert weights["classifier.1.weight"].std().item() == pytest.approx(0.01, rel=0.02)
    assert weights["classifier.1.bias"].abs().max() == 0


# --- refusals


@pytest.mark.parametrize("name", SMALLEST)
def test_too_small_an_input_is_refused_and_the_smallest_is_not(name: str) -> None:
    height, width = SMALLEST[name]
    on_meta(name, input=(1, height, width)).eval()(torch.empty(1, 1, height, width, device="meta"))
    for given in ((height - 1, width), (height, width - 1)):
        with pytest.raises(ModelError) as caught:
            on_meta(name, input=(1, *given))
        shown = ",".join(map(str, given))
        assert caught.value.problem == (
            f"{name} cannot take the input shape 1,{shown}: {given[0]}x{given[1]} is too small for its strides."
        )
        assert caught.value.remedy.startswith(
            f"The smallest that works is {height}x{width}: give 1,{height},{width} or more"
        )


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenet_v2"])
def test_padded_networks_take_a_single_pixel(name: str) -> None:
    model = on_meta(name, input=(3, 1, 1)).eval()
    assert model(torch.empty(1, 3, 1, 1, device="meta")).shape == (1, 1000)


@every_network
def test_wrong_number_of_extents_is_refused(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        on_meta(name, input=(224, 224))
    assert caught.value.problem == f"{name} cannot take the input shape 224,224: it has 2 numbers."
    assert "channels,height,width" in caught.value.remedy


def test_unet_names_both_layouts() -> None:
    with pytest.raises(ModelError, match="channels,height,width or channels,depth,height,width"):
        shoal.zoo.unet(input=(1, 16, 16, 16, 16))


@every_network
@pytest.mark.parametrize("shape", [(0, 224, 224), (3, 224, -1), (3.0, 224, 224)])
def test_impossible_extents_are_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="every number must be a whole one above 0"):
        on_meta(name, input=shape)


@every_network
@pytest.mark.parametrize("classes", [0, -3])
def test_less_than_one_class_is_refused(name: str, classes: int) -> None:
    with pytest.raises(ModelError) as caught:
        on_meta(name, classes=classes)
    assert caught.value.problem == f"{name} cannot have {classes} classes."
    assert caught.value.remedy == "Give a number of classes of at least 1."


def test_unet_refuses_what_pooling_would_crop() -> None:
    with pytest.raises(ModelError) as caught:
        shoal.zoo.unet(input=(1, 100, 64))
    assert caught.value.problem == (
        "unet of depth 4 cannot take the input shape 1,100,64: 100x64 does not divide by 16."
    )
    assert caught.value.remedy == "Crop to 1,96,64, pad to 1,112,64, or give a smaller depth."
    for fits in ((1, 96, 64), (1, 112, 64)):
        assert on_meta("unet", input=fits)(torch.empty(1, *fits, device="meta")).shape[2:] == fits[1:]


@pytest.mark.parametrize("option", ["width", "depth"])
def test_unet_refuses_nothing_to_build(option: str) -> None:
    with pytest.raises(ModelError, match=f"unet cannot have a {option} of 0"):
        on_meta("unet", **{option: 0})


def test_acoustic_refuses_no_width() -> None:
    with pytest.raises(ModelError, match="acoustic cannot have a width of 0"):
        shoal.zoo.acoustic(width=0)


# --- the package


def test_exports_are_the_names_and_nothing_is_hidden_by_a_module() -> None:
    assert set(shoal.zoo.__all__) == {"build", "names", *shoal.zoo.names()}
    assert set(shoal.zoo.__all__) <= set(dir(shoal.zoo))
    for name in shoal.zoo.names():
        assert getattr(shoal.zoo, name).__name__ == name


def test_unknown_attribute() -> None:
    missing = "resnet19"
    with pytest.raises(AttributeError, match=r"'shoal\.zoo' has no attribute 'resnet19'"):
        getattr(shoal.zoo, missing)


@pytest.mark.parametrize("use", ["names()", "lenet5()"])
def test_names_come_without_torch(use: str) -> None:
    """The second use shows that the check can fail."""
    script = f"import sys, shoal.zoo; shoal.zoo.{use}; sys.exit('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert run.returncode == (use != "names()")


# --- build


def test_build_passes_what_is_given() -> None:
    model = shoal.zoo.build("lenet5", input=(3, 32, 32), classes=4)
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 4)
    assert parameter_count(shoal.zoo.build("lenet5")) == PUBLISHED["lenet5"]


def test_build_lets_the_networks_own_refusal_through() -> None:
    with pytest.raises(ModelError, match="vgg16 cannot take the input shape 3,8,8"):
        shoal.zoo.build("vgg16", input=(3, 8, 8))


FACTORIES = """
from torch import nn

from shoal.errors import DataError, ModelError

built = nn.Linear(1, 1)
number = 3


def neither():
    return nn.Linear(2, 2)


def only_classes(classes=1):
    return nn.Linear(2, classes)


def anything(**options):
    model = nn.Linear(2, 2)
    model.options = options
    return model


def by_position(classes=1, /):
    return nn.Linear(2, classes)


class Net(nn.Module):
    def __init__(self, *, input, classes):
        super().__init__()
        self.fc = nn.Linear(input[0], classes)


def late():
    from blocks import block

    return block()


def required(depth):
    return nn.Linear(depth, depth)


def broken():
    raise ValueError("three is\\n too many.")


def silent():
    raise ValueError


def refuses():
    raise ModelError("Too thin.", "Feed it.")


def lacks_data():
    raise DataError("No data.", "Fetch it.")


def forgets():
    nn.Linear(2, 2)


def returns_list():
    return [nn.Linear(2, 2)]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with modules of a user's own; not on `sys.path`."""
    (tmp_path / "own_models").mkdir()
    (tmp_path / "own_models" / "nets.py").write_text(FACTORIES)
    (tmp_path / "own_models" / "needs.py").write_text("import no_such_dependency\n")
    (tmp_path / "own_models" / "crash.py").write_text("1 / 0\n")
    (tmp_path / "own_models" / "leave.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "own_models" / "typo.py").write_text("def net(:\n")
    (tmp_path / "own_models" / "empty.py").write_text("")
    (tmp_path / "own_models" / "with-dash.py").write_text(FACTORIES)
    (tmp_path / "own_models" / "json.py").write_text(FACTORIES)
    (tmp_path / "own_models" / "beside_it.py").write_text("import the_net\n\n\ndef net():\n    return the_net.net()\n")
    (tmp_path / "own_models" / "the_net.py").write_text(
        "from torch import nn\n\n\ndef net():\n    return nn.Linear(6, 5)\n"
    )
    (tmp_path / "blocks.py").write_text("from torch import nn\n\n\ndef block():\n    return nn.Linear(5, 5)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("own_models", "blocks", "beside_it", "the_net")
    ]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def in_features(model: nn.Module) -> object:
    return model.in_features


@pytest.mark.usefixtures("folder")
def test_build_finds_the_working_directory_and_leaves_the_path_alone() -> None:
    before = list(sys.path)
    assert in_features(shoal.zoo.build("own_models.nets:neither", input=(1, 2, 3), classes=9)) == 2
    assert in_features(shoal.zoo.build("own_models.nets:late")) == 5
    assert sys.path == before


def test_build_takes_a_file_with_what_lies_beside_it(folder: Path) -> None:
    before = list(sys.path)
    for spec in ("own_models/beside_it.py:net", f"{folder}/own_models/beside_it.py:net", "./own_models/the_net.py:net"):
        assert in_features(shoal.zoo.build(spec)) == 6
    assert sys.path == before


@pytest.mark.parametrize("entry", ["", "."])
def test_build_takes_the_path_as_it_is(folder: Path, entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, entry and str(folder)])
    before = list(sys.path)
    shoal.zoo.build("own_models.nets:neither")
    assert sys.path == before


@pytest.mark.usefixtures("folder")
def test_build_passes_only_what_the_factory_accepts() -> None:
    def weight_shape(factory: str) -> tuple[int, ...]:
        model = shoal.zoo.build(f"own_models.nets:{factory}", input=(6, 2), classes=9)
        return tuple(next(model.parameters()).shape)

    assert weight_shape("only_classes") == (9, 2)
    assert weight_shape("by_position") == (1, 2)
    assert weight_shape("Net") == (9, 6)
    anything = shoal.zoo.build("own_models.nets:anything", classes=9)
    assert anything.options == {"classes": 9}


def test_build_passes_every_option() -> None:
    model = shoal.zoo.build("unet", input=(1, 8, 8), options={"width": 4, "depth": 2})
    assert model.state_dict()["bottleneck.0.weight"].shape == (16, 8, 3, 3)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        ("unet", "Did you mean 'width'? Known: "),
        ("own_models.nets:neither", "Known: none."),
    ],
)
def test_build_refuses_an_option_that_the_factory_lacks(spec: str, remedy: str) -> None:
    with pytest.raises(ModelError) as caught:
        shoal.zoo.build(spec, options={"widht": 4})
    assert caught.value.problem == f"the model {spec!r} has no option 'widht'."
    assert caught.value.remedy.startswith(remedy)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("spec", "problem", "remedy"),
    [
        (
            "resnet19",
            "there is no model 'resnet19' in the zoo.",
            "Did you mean 'resnet18'? Known: lenet5, alexnet, vgg16, inception_v3, resnet18, resnet50, "
            "mobilenet_v2, unet, acoustic. A model of your own is given as package.module:factory, "
            "or as path/to/file.py:factory.",
        ),
        (
            ":net",
            "the model ':net' lacks a module or a factory.",
            "A model of your own is given as package.module:factory, or as path/to/file.py:factory.",
        ),
        (
            "own_models.nets:",
            "the model 'own_models.nets:' lacks a module or a factory.",
            "A model of your own is given as package.module:factory, or as path/to/file.py:factory.",
        ),
        (
            "own_models.nest:neither",
            "the model 'own_models.nest:neither' cannot be imported: there is no module 'own_models.nest'.",
            "It was looked for in {folder} and among the installed packages. "
            "A model of your own is given as package.module:factory, or as path/to/file.py:factory.",
        ),
        (
            "no_such_package.nets:neither",
            "the model 'no_such_package.nets:neither' cannot be imported: there is no module 'no_such_package'.",
            "It was looked for in {folder} and among the installed packages. "
            "A model of your own is given as package.module:factory, or as path/to/file.py:factory.",
        ),
        (
            "./nothing.py:net",
            "the model './nothing.py:net' cannot be imported: there is no file 'nothing.py'.",
            "It was looked for from {folder}. "
            "A model of your own is given as package.module:factory, or as path/to/file.py:factory.",
        ),
        (
            "own_models/with-dash.py:net",
            "the model 'own_models/with-dash.py:net' cannot be imported: 'with-dash' is not a name that Python can "
            "import.",
            "Rename the file: letters, digits and underscores.",
        ),
        (
            "own_models/json.py:net",
            "the model 'own_models/json.py:net' cannot be imported: another module is called 'json'.",
            "Rename the file.",
        ),
        (
            "own_models.needs:net",
            "the model 'own_models.needs:net' cannot be imported: there is no module 'no_such_dependency'.",
            "own_models.needs imports no_such_dependency: install it, or correct that import.",
        ),
        (
            "own_models.crash:net",
            "the model 'own_models.crash:net' cannot be imported: "
            "importing own_models.crash raised ZeroDivisionError: division by zero.",
            "Correct that module until `python -c 'import own_models.crash'` succeeds.",
        ),
        (
            "own_models.leave:net",
            "the model 'own_models.leave:net' cannot be imported: importing own_models.leave raised SystemExit: 3.",
            "Correct that module until `python -c 'import own_models.leave'` succeeds.",
        ),
        (
            "own_models.nets:neihter",
            "the model 'own_models.nets:neihter' was not found: own_models.nets has no 'neihter'.",
            "Did you mean 'neither'? Known: neither, only_classes, anything, by_position, Net, late, "
            "required, broken, silent, refuses, lacks_data, forgets, returns_list.",
        ),
        (
            "own_models.empty:net",
            "the model 'own_models.empty:net' was not found: own_models.empty has no 'net'.",
            "own_models.empty defines no function and no class.",
        ),
        (
            "own_models.nets:number",
            "the model 'own_models.nets:number' cannot be built: number is int, not a factory.",
            "Name a function that returns the model, or the model's class.",
        ),
        (
            "own_models.nets:built",
            "the model 'own_models.nets:built' cannot be built: "
            "built is torch.nn.modules.linear.Linear, not a factory.",
            "Name a function that returns the model, or the model's class.",
        ),
        (
            "own_models.nets:broken",
            "the model 'own_models.nets:broken' could not be built: its factory raised ValueError: three is too many.",
            "It was called as factory(): correct the factory, or what it is given.",
        ),
        (
            "own_models.nets:silent",
            "the model 'own_models.nets:silent' could not be built: its factory raised ValueError.",
            "It was called as factory(): correct the factory, or what it is given.",
        ),
        (
            "own_models.nets:forgets",
            "the model 'own_models.nets:forgets' could not be built: it returned None, not a torch.nn.Module.",
            "Name a function that returns the model, or the model's class.",
        ),
        (
            "own_models.nets:returns_list",
            "the model 'own_models.nets:returns_list' could not be built: it returned list, not a torch.nn.Module.",
            "Name a function that returns the model, or the model's class.",
        ),
        ("own_models.nets:refuses", "Too thin.", "Feed it."),
    ],
)
def test_build_refuses(spec: str, problem: str, remedy: str) -> None:
    before = list(sys.path)
    with pytest.raises(ModelError) as caught:
        shoal.zoo.build(spec)
    assert caught.value.problem == problem
    assert caught.value.remedy == remedy.format(folder=Path.cwd())
    assert sys.path == before


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("own_models.typo:net", "importing own_models.typo raised SyntaxError"),
        (".nets:neither", "importing .nets raised TypeError"),
        ("own_models.nets:required", r"missing 1 required positional argument: 'depth'"),
        ("own_models.nets:Net", r"It was called as factory\(classes=3\)"),
    ],
)
def test_build_repeats_pythons_own_words(spec: str, text: str) -> None:
    with pytest.raises(ModelError, match=text):
        shoal.zoo.build(spec, classes=3)


@pytest.mark.usefixtures("folder")
def test_build_lets_other_shoal_errors_through() -> None:
    with pytest.raises(DataError, match="Fetch it"):
        shoal.zoo.build("own_models.nets:lacks_data")
