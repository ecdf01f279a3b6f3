"""Fused attention operators that return their log-sum-exp, so that parts of one softmax can be merged."""
