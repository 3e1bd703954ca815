"""The sections of benchmarks that have several: each measures one claim and returns its bars, figures and table."""
