"""Operator rules: which cuts each operator allows, what a part reads, and how it is computed."""

from shoal.operators.base import Axis, Call, Need, Op, Part, Rule, Whole
from shoal.operators.registry import rule_for

__all__ = ["Axis", "Call", "Need", "Op", "Part", "Rule", "Whole", "rule_for"]
