"""Operator rules: which cuts each operator allows, what a part reads, how it is computed, what else is known of it."""

from shoal.operators.base import Axis, Call, Facts, Need, Op, Part, Rule, Whole
from shoal.operators.registry import facts_of, rule_for

__all__ = ["Axis", "Call", "Facts", "Need", "Op", "Part", "Rule", "Whole", "facts_of", "rule_for"]
