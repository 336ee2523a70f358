"""A traced model, cut into stages."""

from taktline.split import Pipe, PipeInfo, SplitPoint, pipe_split, pipeline

__all__ = ["Pipe", "PipeInfo", "SplitPoint", "pipe_split", "pipeline"]
