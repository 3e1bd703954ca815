"""The peers that benchmarks run beside drumline: each a script that trains and prints one RESULT line."""
