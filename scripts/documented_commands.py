"""Every command that the documents print: is it known, does it parse, does it run?

    python -m scripts.documented_commands                 # each is in the table below, and its options exist
    python -m scripts.documented_commands --run           # and run those that can run here, page by page
    python -m scripts.documented_commands --run predict   # of the pages with this in their name
    python -m scripts.documented_commands --run README.md:90            # of a page from this line on

The first is part of `make test` (tests/test_docs.py) and takes seconds. The second takes half an hour on two cores and
needs the data sets and packages that the table names; what is missing is left out, and told. Each page has a folder of
its own, with the images, networks and runs that the pages speak of, and its commands are run there in their order; a
command that stands on several pages is run once. The exit is 1 where a command is in no table or fails.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from scripts.documented_table import TABLE, Left, Run
from shoal.errors import ConfigError

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")))
"""Decisions are not among them: they tell what was, not what to type."""
PROGRAMS = "shoal|torchrun|python|pip|make|srun|sbatch|ray|kubectl|sky|pytest|mkdocs|source|git|pre-commit"
COMMAND = re.compile(rf"(?:\$ )?((?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:{PROGRAMS}) .*)")
SECONDS = 900.0
"""That one command may take."""


@dataclass(frozen=True)
class Printed:
    """A command as it stands on a page."""

    page: str
    line: int
    text: str

    @property
    def where(self) -> str:
        """Page and line."""
        return f"{self.page}:{self.line}"


def printed(page: str) -> Iterator[Printed]:
    """The commands of a page: lines of code, and code within text that is more than a program's name."""
    fence, text, begun = "", "", 1
    for number, line in enumerate([*(ROOT / page).read_text(encoding="utf-8").splitlines(), "```"], 1):
        marks = line.lstrip().startswith("```")
        is_code = bool(fence) or line.startswith("    ")
        if not (marks or is_code):
            text += f"{line}\n"
            continue
        for code in re.finditer(r"`([^`]+)`", text):  # which may go on in the next line
            yield from _commands(page, begun + text[: code.start()].count("\n"), code[1])
        text, begun = "", number + 1
        if marks:
            fence = "" if fence else line.strip()
        elif fence in ("", "```", "```sh", "```console"):
            yield from _commands(page, number, line)


def _commands(page: str, number: int, code: str) -> Iterator[Printed]:
    if (found := COMMAND.fullmatch(" ".join(code.split()))) is not None:
        yield Printed(page, number, without_comment(found[1]))


def without_comment(line: str) -> str:
    """The command alone, with single spaces.

    >>> without_comment("shoal train --resume  runs/NAME    # go on")
    'shoal train --resume runs/NAME'
    """
    return " ".join(re.sub(r"\s+# .*", "", line).split())


def is_mention(text: str) -> bool:
    """Whether it names a command of Shoal and says nothing of its options: `shoal plan`."""
    return re.fullmatch(r"shoal \w+", text) is not None and text not in TABLE


def unknown(commands: Sequence[Printed]) -> list[str]:
    """What stands on a page but not in the table, and the other way round."""
    texts = {command.text for command in commands}
    new = [f"{c.where}: not in the table: {c.text}" for c in commands if c.text not in TABLE and not is_mention(c.text)]
    return new + [f"in the table, on no page: {text}" for text in TABLE if text not in texts]


def wrong(text: str) -> str | None:
    """Why a command cannot be what it is meant to be, found without running it; None where nothing is wrong."""
    words = _filled(shlex.split(text))
    program, arguments = words[0].removeprefix(".venv/bin/"), words[1:]
    if "shoal" in words and program in ("torchrun", "srun", "ray"):
        program, arguments = "shoal", words[words.index("shoal") + 1 :]
    match program, arguments:
        case "shoal", [name, *rest]:
            return _wrong_options(name, rest)
        case "python", ["-m", module, *_]:
            return None if _is_module(module) else f"there is no module {module}"
        case (("python" | "pytest" | "torchrun"), _):
            files = [word for word in arguments if word.endswith(".py")]
            return next((f"there is no file {file}" for file in files if not (ROOT / file).exists()), None)
        case (("sbatch" | "kubectl" | "sky"), _):
            files = [word for word in arguments if word.startswith("examples/")]
            return next((f"there is no file {file}" for file in files if not (ROOT / file).exists()), None)
        case "make", [target, *_] if re.match(r"\w+$", target):
            is_target = re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            return None if is_target else f"the Makefile has no target {target}"
        case "pip", _:
            return _wrong_extras(arguments)
    return None


def _filled(words: list[str]) -> list[str]:
    """Without what a page leaves to the reader, and the option that it is of; without variables before the program."""
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    left_out = {i for i, word in enumerate(words) if word == "..."}
    left_out |= {i - 1 for i in left_out if words[i - 1].startswith("--")}
    return [word for i, word in enumerate(words) if i not in left_out]


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _wrong_extras(arguments: Sequence[str]) -> str | None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = [extra for word in arguments for extra in re.findall(r"^\.\[(.*)\]$", word)]
    missing = [name for extra in asked for name in extra.split(",") if name not in known]
    return f"there is no extra {missing[0]}" if missing else None


def _wrong_options(name: str, arguments: list[str]) -> str | None:
    """By click, which reads options without running anything, and by the settings that they are of."""
    from shoal.cli.main import shoal

    needed = {"predict": ["RUN", "FILE"], "evaluate": ["RUN"], "export": ["RUN", "FILE"]}  # a mention leaves them out
    try:
        command = shoal.get_command(click.Context(shoal), name)
        if command is None:
            return f"there is no command {name}"
        if "--help" in arguments or (not arguments and name in needed):
            return None
        if isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
            _, command, arguments = command.resolve_command(click.Context(command), list(arguments))
            assert command is not None, "click refuses what is none"
        _settings(name, command.make_context(name, list(arguments)).params)
    except (click.ClickException, ConfigError) as error:
        return error.format_message() if isinstance(error, click.ClickException) else str(error)
    return None


def _settings(name: str, given: Mapping[str, Any]) -> None:
    """Refuse values that the settings of a command refuse; where some are left out on the page, what is there."""
    from shoal.config import Checked, EvaluateConfig, TrainConfig, VerifyConfig

    kinds: dict[str, type[Checked]] = {"train": TrainConfig, "verify": VerifyConfig, "evaluate": EvaluateConfig}
    if (kind := kinds.get(name)) is not None and not given.get("resume"):
        kind.parse({name: value for name, value in given.items() if name in kind.model_fields and value is not None})


# Running them


def run_all(commands: Sequence[Printed], folder: Path) -> bool:
    """Whether all that could be run ended as they should."""
    failed, left, seen = 0, [], set()
    pages = dict.fromkeys(command.page for command in commands)
    for page in pages:
        place = folder / Path(page).stem
        for command in (command for command in commands if command.page == page):
            how = TABLE.get(command.text)
            if command.text in seen or how is None:
                continue
            seen.add(command.text)
            if isinstance(how, Left):
                left.append((command, how.why))
            elif missing := [need for need in how.needs if not _is_here(need)]:
                left.append((command, f"{missing[0]} is not here"))
            else:
                prepare(place)
                failed += not _run(command, how, place)
    print(f"\nNot run: {len(left)}")
    for command, why in left:
        print(f"  {command.where}  {command.text}\n      {why}")
    print(f"\n{failed} failed." if failed else "\nAll that was run ended as it should.")
    return not failed


def _run(command: Printed, how: Run, place: Path) -> bool:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "SHOAL_CACHE": os.environ.get("SHOAL_CACHE", str(place.parent / "cache")),
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "80",
    }
    text = how.instead or command.text
    for each in (*how.before, text):
        begun = time.monotonic()
        try:
            done = subprocess.run(
                shlex.split(each), cwd=place, env=environment, capture_output=True, text=True, timeout=SECONDS
            )
            code, output = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            code, output = None, f"it did not end within {SECONDS:g} s"
        except OSError as error:
            code, output = None, str(error)
        wanted = how.ends_with if each is text else 0
        if code != wanted:
            print(f"FAILED  {command.where}  {each}\n    exit {code}, not {wanted}\n{_indented(output)}", flush=True)
            return False
    note = f"\n        for  {command.text}" if how.instead else ""
    print(f"ok {time.monotonic() - begun:6.1f} s  {command.where}  {text}{note}", flush=True)
    if how.shown:
        print(_indented(output), flush=True)
    return True


def _indented(output: str) -> str:
    return "\n".join(f"    {line}" for line in output.strip().splitlines()[-25:])


def _is_here(need: str) -> bool:
    """A data set of Shoal's catalog, or a package."""
    from shoal.data import names, where

    return where(need)[0].found is not None if need in names() else find_spec(need) is not None


def prepare(place: Path) -> None:
    """The folder of somebody who has what the pages speak of: images, networks, runs, the checkout's examples."""
    if place.exists():
        return
    place.mkdir(parents=True)
    for name, target in ((".venv", Path(sys.prefix)), ("examples", ROOT / "examples")):
        (place / name).symlink_to(target)
    for folder, count in (("photos", 40), ("others", 10)):
        for number, name in enumerate(("bengal", "siamese", "sphynx")):
            _paint(place / folder / name, count, number)
    _paint(place / "new", 10, 1)
    _draw_cells(place / "cells", 10)
    (place / "nets.py").write_text(_python_of("docs/my_own_network.md")[0])
    (place / "mynet.py").write_text(_python_of("docs/predict.md")[0])
    (place / "my_package").mkdir()
    (place / "my_package" / "nets.py").write_text((place / "nets.py").read_text())
    (place / "recipe.yaml").write_text("model: lenet5\ndata: digits\nepochs: 1\n")


def _python_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def _paint(folder: Path, count: int, kind: int) -> None:
    """Images of one colour with noise; every folder's colour is another."""
    import numpy as np
    from PIL import Image

    draws = np.random.default_rng(kind)
    colour = np.roll((200, 60, 60), kind)
    folder.mkdir(parents=True)
    for number in range(count):
        pixels = draws.normal(colour, 30.0, size=(36, 32, 3)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03}.png")


def _draw_cells(folder: Path, count: int) -> None:
    """Grey images of 64x64 with a bright square each, and their masks."""
    import numpy as np
    from PIL import Image

    draws = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for number in range(count):
        mask = np.zeros((64, 64), dtype=np.uint8)
        top, left = draws.integers(0, 40, 2)
        mask[top : top + 20, left : left + 20] = 1
        noisy = draws.normal(60.0 + 100.0 * mask, 10.0).clip(0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / "images" / f"{number}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{number}.png")


def _is_asked(command: Printed, page: str) -> bool:
    """Whether it stands on a page with this in its name, after the line that is given behind a colon, if any."""
    name, _, line = page.partition(":")
    return name in command.page and command.line >= int(line or 0)


def main() -> int:
    """Check, run if asked to, and print; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run those that can run here")
    parser.add_argument("pages", nargs="*", help="only pages with one of these in their name; NAME:LINE from there on")
    asked = parser.parse_args()
    commands = [command for page in PAGES for command in printed(page)]
    problems = unknown(commands)
    for text, where in {command.text: command.where for command in commands}.items():
        if (why := wrong(text)) is not None:
            problems.append(f"{where}: {text}: {why}")
    print("\n".join(problems) or f"{len(commands)} commands on {len(PAGES)} pages: all are known, and parse.")
    if asked.run:
        chosen = [c for c in commands if not asked.pages or any(_is_asked(c, page) for page in asked.pages)]
        with tempfile.TemporaryDirectory(prefix="shoal-documents-") as folder:
            problems += [] if run_all(chosen, Path(folder)) else ["a command failed"]
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
