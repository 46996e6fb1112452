"""What the benchmarks share: hosts made on one machine, ranks started on them, sides that take turns."""
