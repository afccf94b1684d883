"""hpcllm: training code for large language models that is native to MPI."""

__version__ = "0.1.0"
