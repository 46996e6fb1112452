"""What was measured and found before, in the user's cache. Rank 0 reads and writes; the others hear from it."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from shoal.errors import InputError, PlanError
from shoal.files import cache_folder, write_text_atomically
from shoal.plan import Plan
from shoal.timings import Timings


def fingerprint(*what: object) -> str:
    """A short name for anything that prints the same each time."""
    return hashlib.blake2b(repr(what).encode(), digest_size=8).hexdigest()


def load_timings(key: str) -> Timings | None:
    """What was measured under this key, if it can still be read."""
    path = cache_folder() / f"timings-{key}.json"
    try:
        return Timings.load(path) if path.is_file() else None
    except InputError:
        return None


def save_timings(key: str, timings: Timings) -> None:
    """Keep measurements; a cache that cannot be written is no error."""
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        timings.save(cache_folder() / f"timings-{key}.json")
    except OSError:
        return


def load_choice(key: str) -> tuple[Plan, dict[str, Any]] | None:
    """A plan that won before, and what is known of that race."""
    path = cache_folder() / f"plan-{key}.json"
    try:
        plan = Plan.load(path)
        about: dict[str, Any] = json.loads((cache_folder() / f"race-{key}.json").read_text(encoding="utf-8"))
    except (PlanError, OSError, ValueError):
        return None
    return plan, about


def save_choice(key: str, plan: Plan, about: Mapping[str, Any]) -> None:
    """Keep a winner; a cache that cannot be written is no error."""
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        write_text_atomically(cache_folder() / f"race-{key}.json", json.dumps(dict(about), indent=1) + "\n")
        plan.save(cache_folder() / f"plan-{key}.json")
    except OSError:
        return
