"""Exact mode's operators: the same bits at every tensor-, sequence-, context- and expert-parallel degree.

In: a decoder whose parameters are a rank's, the layout's mesh. Out: the same decoder, computing in fixed pieces.
"""

from drumline.parallel.exact.apply import compute_in_pieces, exact_attend, pieces_of

__all__ = ["compute_in_pieces", "exact_attend", "pieces_of"]
