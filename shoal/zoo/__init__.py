"""The model zoo: the networks of the papers that Shoal follows, as plain modules.

Every factory takes keywords only: `input`, one sample's shape with channels first, and `classes`, the
size of the output; both default to what the network was published with.

    model = shoal.zoo.resnet18(input=(3, 32, 32), classes=10)
    model = shoal.zoo.build("package.module:factory", classes=10)

Parameters bear the names under which these networks' weights are commonly published.
"""

from typing import TYPE_CHECKING

from shoal.zoo.by_name import build, names

if TYPE_CHECKING:
    from shoal.zoo._acoustic import acoustic
    from shoal.zoo._alexnet import alexnet
    from shoal.zoo._inception import inception_v3
    from shoal.zoo._lenet import lenet5
    from shoal.zoo._mobilenet import mobilenet_v2
    from shoal.zoo._resnet import resnet18, resnet50
    from shoal.zoo._unet import unet
    from shoal.zoo._vgg import vgg16
else:
    # Factories load torch, so they are fetched on first use. Their files begin with an underscore because
    # importing a file called alexnet.py would put that module in the place of the factory `alexnet`.

    def __getattr__(name):
        if name in names():
            from shoal.zoo.by_name import zoo_factory

            return zoo_factory(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *names()})


__all__ = [
    "build",
    "names",
    "lenet5",
    "alexnet",
    "vgg16",
    "inception_v3",
    "resnet18",
    "resnet50",
    "mobilenet_v2",
    "unet",
    "acoustic",
]
