"""What `scripts.documented_commands` does with each command that the documents print."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """It is run as it is printed, or in a smaller form of it."""

    instead: str = ""
    """With fewer epochs or less data where it would take many minutes, or with what a placeholder stands for."""
    before: tuple[str, ...] = ()
    """Commands that make what it needs."""
    needs: tuple[str, ...] = ()
    """Data sets and packages that must be there."""
    ends_with: int = 0
    """The exit code."""
    shown: bool = False
    """Whether the end of what it prints is shown, for numbers that the page quotes."""


@dataclass(frozen=True)
class Left:
    """It is not run here."""

    why: str


PACKAGES = Left("installs packages from the index")
TEMPLATE = Left("what stands for ... is the reader's: its options are checked")
BY_HAND = Left("a measurement of many minutes, run by hand: its page, or its benchmark's, has the numbers")
CLUSTER = Left("needs Slurm or a second host; two hosts: tests/cli/test_hosts.py, srun's environment: tests/launching")
ENGINE = Left(
    "needs Slurm, Kubernetes or a cloud; the file is read and its command parsed: tests/test_cluster_files.py"
)
CHECKOUT = Left("a target of the Makefile: it sets up an environment of its own, and CI runs it")
ITSELF = Left("its result is a page that a test compares")

FINISHED = "shoal train --model lenet5 --data folder:photos --input 3,32,32 --epochs 1 --batch 32 --out runs/NAME"
FIRST = "shoal train --model lenet5 --data digits --epochs 1 --out runs/first"
SLIDE = "python -m benchmarks.large_image.slide PATH --side 640"

TABLE: Mapping[str, Run | Left] = {
    # README.md
    'python -m benchmarks.step_time.bench --model alexnet --plans data,owt --others "ddp again" --link 1gbit': BY_HAND,
    'python -m benchmarks.step_time.bench --model resnet18 --plans data/local,data --others "ddp again"': BY_HAND,
    "THP_MEM_ALLOC_ENABLE=0 python -m benchmarks.memory.bench": BY_HAND,
    "python -m benchmarks.slow_link.bench --model resnet18": BY_HAND,
    "make run": CHECKOUT,
    "make test": CHECKOUT,
    "source .venv/bin/activate": Left("changes the shell that one types into"),
    'make run TORCH="torch==2.13.0 ..."': PACKAGES,
    "pip install .": Left("tests/test_wheel.py builds and installs the package"),
    "pip install shoal": Left("what not to type"),
    "make docs": Left("tests/test_docs.py does it"),
    ".venv/bin/torchrun --nproc-per-node 2 examples/shoal_script.py data": Run(shown=True),
    ".venv/bin/torchrun --nproc-per-node 2 examples/shoal_script.py spatial": Run(shown=True),
    ".venv/bin/torchrun --nproc-per-node 4 examples/shoal_script.py 2x2": Run(shown=True),
    "shoal doctor": Run(),
    "shoal train --model resnet18 --data pets32 --epochs 20": Run(
        instead="shoal train --model resnet18 --data pets32 --epochs 1", needs=("pets32",)
    ),
    "shoal train --model my_package.nets:build --data folder:photos --input 3,64,64": Run(),
    "shoal train recipe.yaml --lr 0.02 --print-config": Run(),
    "shoal train --optimizer adamw": Run(),
    "shoal train --workers 2 --plan owt --model alexnet --data synthetic --input 3,224,224": Run(
        instead="shoal train --workers 2 --plan owt --model alexnet --data synthetic:64 --input 3,224,224 --epochs 1"
    ),
    "shoal train --workers 4 --plan spatial examples/nuclei.yaml": Run(
        instead="shoal train --workers 4 --plan spatial examples/nuclei.yaml --epochs 1 --warmup 0", needs=("nuclei",)
    ),
    "torchrun --nproc-per-node 2 -m shoal train --plan data": Run(),
    "shoal train --resume runs/NAME": Run(instead="shoal train --resume runs/NAME --epochs 2", before=(FINISHED,)),
    "shoal train --resume runs/NAME --workers 4 --plan model": Run(
        instead="shoal train --resume runs/NAME --workers 4 --plan model --epochs 3"
    ),
    "shoal train --out runs/NAME --resume auto --restarts 3": Run(
        instead="shoal train --out runs/auto --resume auto --restarts 3 --epochs 1"
    ),
    "shoal predict runs/NAME photos --csv classes.csv": Run(),
    "shoal evaluate runs/NAME --data folder:others --workers 2": Run(),
    "shoal export runs/NAME network.pt2": Run(),
    "shoal verify --model resnet18 --workers 2 --plan spatial": Run(),
    "shoal plan --model vgg16 --workers 4 --cluster p100-4x4": Run(),
    'shoal plan --model vgg16 --workers 2 --cluster titan-4 --pin "*=n2" --optimizer adam --optimizer-state cut': Run(),
    "shoal plan --model vgg16 --workers 16 --cluster p100-4x4 --batch 4": Run(),
    "shoal plan --model unet --model-options width=8,depth=2 --input 3,64,64 --classes 2 --batch 8 --workers 2 "
    "--cluster titan-4 --memory 42478312": Run(shown=True),
    "shoal compare --plans data,auto,ddp --data digits": Run(
        instead="shoal compare --plans data,auto,ddp --data digits --epochs 1 --rounds 2"
    ),
    "shoal train --workers 2 --plan auto --model lenet5": Run(),
    "shoal train --replicas 2 --exchange downpour": Run(),
    "shoal train --model lenet5 --data fashion-mnist --epochs 5": BY_HAND,
    "shoal train --model acoustic --data audiomnist --epochs 10 --lr 0.03": BY_HAND,
    "shoal train examples/nuclei.yaml": BY_HAND,
    # CONTRIBUTING.md and SECURITY.md
    "make check": CHECKOUT,
    "make format": CHECKOUT,
    "pre-commit install": Left("changes the checkout's own git hooks"),
    'make test ARGS="tests/unit -k order"': CHECKOUT,
    "make test AT_ONCE=": CHECKOUT,
    "make test ARGS=--thorough": CHECKOUT,
    "python -m scripts.documented_commands --run": Left("is this script"),
    "git log -1 --format=%ae": Left("prints an address of the checkout's history"),
    "python -m benchmarks.strangers": BY_HAND,
    # docs/
    "shoal train --out runs/mine --checkpoint-every 10min --resume auto": Run(),
    "shoal train --elastic 2:4 --checkpoint-every 500steps --out runs/mine": Run(
        instead="shoal train --elastic 2:4 --checkpoint-every 500steps --out runs/elastic --data digits --epochs 1"
    ),
    "torchrun --nproc-per-node 4 --max-restarts 3 -m shoal train --out runs/mine --checkpoint-every 500steps "
    "--resume auto ...": TEMPLATE,
    "shoal compare --plans data,owt,auto,ddp --exchanges allreduce,downpour,local --workers 4 --data digits --epochs 5 "
    "--out runs/compare": Run(shown=True),
    "shoal compare --resume DIR": Run(instead="shoal compare --resume runs/compare"),
    "shoal train --plan ddp": Run(instead="shoal train --plan ddp --workers 2 --data digits --epochs 1"),
    "pip install 'shoal-train[report]'": PACKAGES,
    "shoal train --model lenet5 --workers 2 --plan owt --out runs/owt": Run(
        instead="shoal train --model lenet5 --workers 2 --plan owt --data digits --epochs 1 --out runs/owt"
    ),
    "shoal report runs/owt": Run(),
    "shoal report runs/data runs/owt --out both.html": Run(
        before=("shoal train --model lenet5 --workers 2 --data digits --epochs 1 --out runs/data",)
    ),
    "shoal train --trace": Run(instead="shoal train --trace --data digits --epochs 1"),
    "shoal train ... --json": TEMPLATE,
    "shoal report runs/owt --json": Run(),
    "shoal train ... --tensorboard": TEMPLATE,
    "shoal report DIR": TEMPLATE,
    "pip install 'shoal-train[trace]'": PACKAGES,
    "shoal train --model lenet5 --data digits --workers 2 --plan spatial --trace --out runs/traced": Run(),
    "shoal trace show runs/traced": Run(shown=True),
    "shoal trace open runs/traced": Left("opens a browser: tests/tracing/test_perfetto.py"),
    "shoal profile --model lenet5 --input 1,28,28 --classes 10 --batch 64 --workers 2 --out timings.json": Run(),
    "shoal trace show runs/traced --predicted --timings timings.json": Run(shown=True),
    "shoal trace open runs/traced --predicted --timings timings.json --out both.json": Left(
        "opens a browser: tests/tracing/test_perfetto.py"
    ),
    "python -m scripts.operator_table": ITSELF,
    "shoal train --plan auto": TEMPLATE,
    "shoal train --model alexnet --workers 4 --plan owt:c": Run(
        instead="shoal train --model lenet5 --workers 2 --plan owt:c --data digits --epochs 1"
    ),
    "pip install tifffile zarr": PACKAGES,
    "python -m benchmarks.huge_pages.bench": BY_HAND,
    "shoal train --replicas 2 --workers 4 --plan data --exchange downpour": Run(),
    "shoal train --replicas 2 --exchange dasgd --exchange-options density=0.01,servers=processes": Run(),
    "shoal train --replicas 2 --exchange allreduce --exchange-options compress=int8": Run(),
    "shoal train --replicas 2 --exchange downpour --exchange-options compress=topk,density=0.05": Run(),
    "shoal train --join DIR": Left("needs a run that is under way: tests/cli/test_exchange.py"),
    "srun --kill-on-bad-exit=0": CLUSTER,
    "shoal train --model unet --model-options width=8 --data pairs:cells --workers 2 --plan spatial --batch 1 "
    "--epochs 20": Run(
        instead="shoal train --model unet --model-options width=8 --data pairs:cells --workers 2 --plan spatial "
        "--batch 1 --epochs 2"
    ),
    "shoal plan --model unet --input 1,2048,2048 --classes 2 --batch 1 --workers 4 --cluster p100-4x4": Run(shown=True),
    "shoal plan ... --memory 8GiB --out plan.json": TEMPLATE,
    "shoal train ... --plan plan.json": TEMPLATE,
    "pip install PATH_TO_THE_CHECKOUT": Left("tests/test_wheel.py builds and installs the package"),
    "shoal train --model unet --data windows:PATH --input 1,1024,1024 --classes 2 --batch 1 --workers 2 "
    "--plan spatial --out runs/slides": Run(
        instead="shoal train --model unet --model-options width=4 --data windows:PATH --input 1,128,128 --classes 2 "
        "--batch 1 --workers 2 --plan spatial --epochs 1 --out runs/slides",
        before=(SLIDE,),
        needs=("tifffile",),
    ),
    "shoal predict runs/slides slide2.tif --size windows --out masks": Run(
        instead="shoal predict runs/slides PATH/images/slide.tif --size windows --out masks", needs=("tifffile",)
    ),
    "pip install imagecodecs": PACKAGES,
    "python -m benchmarks.large_image.slide /tmp/slide": BY_HAND,
    "python -m benchmarks.large_image.bench /tmp/slide": BY_HAND,
    "shoal train --workers 4 --plan spatial ...": TEMPLATE,
    "torchrun --nproc-per-node 4 -m shoal train --plan spatial ...": TEMPLATE,
    "torchrun --nnodes 2 --node-rank I --nproc-per-node 4 --master-addr HOST --master-port 29500 -m shoal train ...": (
        CLUSTER
    ),
    "srun --ntasks 8 --cpus-per-task 4 shoal train --threads 4 ...": CLUSTER,
    "shoal train --model alexnet --data synthetic:64 --input 3,64,64 --classes 20000 --workers 2 --plan owt "
    "--epochs 1 --batch 32": Run(),
    "shoal plan --model alexnet --classes 100000 --batch 128 --workers 4 --cluster p100-4x4": Run(shown=True),
    "shoal train --model nets.py:build --data folder:photos --epochs 3 --lr 0.02": Run(),
    "shoal train --model nets.py:build --data folder:photos --model-options width=32 --workers 2 --plan auto": Run(),
    "shoal verify --model nets.py:build --input 3,32,32 --classes 3 --batch 4 --workers 2 --plan spatial": Run(
        shown=True
    ),
    "python -m scripts.network_table": BY_HAND,
    "pip install -e '.[dev,zoo-wide]'": PACKAGES,
    "torchrun --nproc-per-node 2 -m shoal train --plan data --data digits --epochs 1": Run(),
    "torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr HOST --master-port 29500 -m shoal train "
    "--plan auto ...": CLUSTER,
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:4 --nproc-per-node 4 --max-restarts 10 "
    "--rdzv-backend c10d --rdzv-endpoint HOST:29400 --rdzv-id mine -m shoal train "
    "--plan data --out runs/mine --checkpoint-every 10min "
    "--resume auto ...": Left("needs several hosts; two agents on one: tests/cli/test_kills.py"),
    "pip install 'shoal-train[ray]'": PACKAGES,
    "shoal train --on ray --workers 8 --plan auto ...": TEMPLATE,
    "ray job submit --address http://HEAD:8265 -- shoal train --on ray --workers 8 ...": TEMPLATE,
    "shoal train --on ray --workers 2 --plan spatial --data digits --epochs 1": Run(needs=("ray",)),
    "sbatch examples/clusters/slurm.sbatch": ENGINE,
    "kubectl apply -f examples/clusters/kubernetes.yaml": ENGINE,
    "sky jobs launch examples/clusters/skypilot.yaml": ENGINE,
    "srun --ntasks 8 --cpus-per-task 4 shoal train --threads 4 --plan auto ...": CLUSTER,
    "shoal plan --model ... --cluster FILE": TEMPLATE,
    "pip install '.[timm]'": PACKAGES,
    "pip install timm": PACKAGES,
    "pip install torchvision==0.28.*": PACKAGES,
    "pip install monai": PACKAGES,
    "pip install lightning": PACKAGES,
    "shoal train examples/timm_digits.yaml --workers 2": Run(needs=("timm",)),
    "shoal train examples/monai_volumes.yaml --workers 2 --plan spatial": Run(needs=("monai",)),
    "shoal verify --model monai:UNet --model-options 'channels=[4,8],strides=[2]' --input 1,16,16,16 --classes 2 "
    "--batch 2 --workers 2 --plan spatial": Run(needs=("monai",)),
    "pytest tests/integrations/test_packages.py -s": Left("is a test itself"),
    "python examples/lightning_script.py one": Run(needs=("lightning",), shown=True),
    "python examples/lightning_script.py spatial": Run(needs=("lightning",), shown=True),
    "shoal train --help": Run(),
    "shoal plan --model vgg16 --workers 4 --cluster p100-4x4 --out plan.json": Run(),
    "shoal plan --model alexnet --input 3,64,64 --batch 32 --workers 2 --out small.json": Run(),
    "shoal train --model vgg16 --data ... --workers 4 --plan plan.json": TEMPLATE,
    "shoal profile --out FILE": TEMPLATE,
    "pip install cairosvg": PACKAGES,
    "shoal plan --model alexnet --input 3,64,64 --workers 4 --cluster titan-4 --batch 32": ITSELF,
    "shoal simulate owt --model alexnet --batch 512 --cluster p100-4x4": Run(),
    "shoal simulate plan.json --model vgg16 --cluster p100-4x4 --trace step.json": Run(
        before=("shoal plan --model vgg16 --workers 4 --cluster p100-4x4 --out plan.json",)
    ),
    "shoal simulate data --model vgg16 --batch 2048 --cluster p100-4x4 --what-if bandwidth=2x --what-if devices=64 "
    "--json": Run(),
    "shoal simulate --model lenet5 --replicas 64 --exchange gossip --cluster internet --batch 2048 "
    "--steps 200": BY_HAND,
    "shoal simulate --model lenet5 --replicas 64 --exchange local --cluster internet --batch 2048 --steps 60 "
    "--step-seconds 1 --train --data fashion-mnist": BY_HAND,
    "shoal simulate --model resnet18 --replicas 64 --cluster internet --batch 2048 --steps 48 --jitter 0.2 "
    "--exchange NAME --exchange-options ...": BY_HAND,
    "shoal simulate --model lenet5 --replicas 64 --cluster internet --batch 2048 --steps 60 --jitter 0.2 "
    "--step-seconds 1 --churn lifetime=600,away=150 --train --data fashion-mnist --exchange NAME": BY_HAND,
    "shoal papers": Run(),
    "shoal papers optcnn": Run(),
    "shoal papers optcnn --measure": BY_HAND,
    "shoal papers owt": Run(),
    "shoal papers yadan": Run(),
    "shoal papers poseidon": Run(),
    "shoal papers campos": Run(),
    "shoal papers chan-lane": Run(),
    "shoal papers paine": Run(),
    "shoal papers chan-lane --json": Run(),
    "shoal plan show plan.json": Run(),
    "shoal plan show plan.json --model vgg16 --cluster p100-4x4 --picture plan.svg": Run(),
    "shoal plan diff a.json b.json": Run(
        before=(
            "shoal plan --model lenet5 --workers 2 --batch 16 --cluster titan-4 --out a.json",
            "shoal plan --model lenet5 --workers 2 --batch 16 --cluster ethernet-1g --out b.json",
        )
    ),
    "shoal plan diff a.json b.json --model vgg16 --timings timings.json": Run(
        instead="shoal plan diff a.json b.json --model lenet5 --batch 16 --timings timings.json",
        before=("shoal profile --model lenet5 --workers 2 --batch 16 --out timings.json",),
    ),
    "shoal profile --model vgg16 --workers 4 --batch 128 --out timings.json": Run(
        instead="shoal profile --model alexnet --input 3,64,64 --workers 2 --batch 32 --out more.json"
    ),
    "shoal train --model mynet.py:Net --data folder:photos --input 3,32,32 --batch 16 --epochs 4 --workers 2 "
    "--plan auto --out runs/mine": Run(),
    "shoal predict runs/mine new": Run(shown=True),
    "shoal predict runs/mine new --csv predictions.csv --top 3": Run(),
    "shoal predict runs/mine new --json": Run(),
    "shoal train --resume runs/mine --epochs 6": Run(),
    "shoal evaluate runs/mine": Run(shown=True),
    "shoal evaluate runs/mine --workers 2 --plan spatial": Run(),
    "shoal evaluate runs/mine --data folder:photos": Run(),
    "shoal export runs/mine mine.safetensors": Run(),
    "shoal export runs/mine mine.pt2": Run(),
    "shoal train --resume runs/mine": Left("refused, as the page says: tests/test_own_objects.py"),
    "pip install onnx onnxscript": PACKAGES,
    "shoal train --model lenet5 --data fashion-mnist --epochs 5 --threads 1": BY_HAND,
    "shoal train --model acoustic --data audiomnist --epochs 10 --lr 0.03 --threads 1": BY_HAND,
    "shoal train examples/nuclei.yaml --threads 1": BY_HAND,
    "python benchmarks/single_worker/bench.py --pairs 25 --data digits": BY_HAND,
    'git clone ... shoal && cd shoal && make run ARGS="--epochs 1"': BY_HAND,
    "pip install --no-deps --target": PACKAGES,
    "shoal train --out DIR": Run(instead="shoal train --data digits --epochs 1 --out DIR"),
    "shoal train DIR/config.yaml --out OTHER": Run(),
    "shoal plan --model vgg16 --workers 4 --cluster ethernet-1g --batch 64": Run(shown=True),
    "shoal train --replicas 2 --exchange local --exchange-options period=10": Run(),
    "shoal train --model resnet18 --data folder:photos --input 3,32,32 --epochs 20 --augment flip,shift:2 "
    "--out runs/photos": Run(
        instead="shoal train --model resnet18 --data folder:photos --input 3,32,32 --epochs 2 --augment flip,shift:2 "
        "--out runs/photos"
    ),
    "shoal train --resume runs/photos --epochs 25": Run(instead="shoal train --resume runs/photos --epochs 3"),
    "shoal train --model resnet18 --data folder:photos --input 3,32,32 --workers 2": Run(),
    "shoal train --model lenet5 --data folder:photos --input 3,32,32 --workers 2 --plan auto": Run(),
    "shoal train --optimizer adamw --lr 0.002 --optimizer-options betas=[0.9,0.95],eps=1e-6": Run(),
    "shoal train --workers 2 --optimizer adam --optimizer-state cut": Run(
        instead="shoal train --workers 2 --optimizer adam --optimizer-state cut --data synthetic:64 --epochs 1"
    ),
    "shoal train --init runs/first/model.safetensors": Run(
        instead="shoal train --init runs/first/model.safetensors --epochs 1", before=(FIRST,)
    ),
    "shoal train --init pretrained.safetensors --init-partial --data folder:my/images": Run(
        instead="shoal train --init runs/first/model.safetensors --init-partial --data folder:photos --input 1,28,28 "
        "--batch 32 --epochs 1"
    ),
    "shoal train ... --print-config": TEMPLATE,
    "shoal verify --model ... --workers 2 --plan ...": TEMPLATE,
    "shoal verify --model my_package.nets:build --input 3,64,64 --plan plan.json --workers 4": Run(
        before=(
            "shoal plan --model my_package.nets:build --input 3,64,64 --classes 10 --workers 4 --cluster titan-4 "
            "--batch 8 --out plan.json",
        )
    ),
    "shoal verify --model unet --model-options width=4 --data nuclei --batch 1 --plan spatial --json verdict.json": Run(
        needs=("nuclei",)
    ),
    "torchrun -m shoal verify": TEMPLATE,
    "shoal train --model unet --data nuclei --batch 1 --epochs 1 --threads 1": BY_HAND,
    "shoal train --model unet --data nuclei --batch 1 --epochs 1 --threads 1 --workers 2 --plan spatial": BY_HAND,
    "shoal verify --model unet --workers 2 --plan spatial": Run(),
    "THP_MEM_ALLOC_ENABLE=0 python -m benchmarks.memory.bench --recompute": BY_HAND,
    "python -m benchmarks.many_classes.bench": BY_HAND,
}
