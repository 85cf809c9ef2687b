"""Padding tokens that are not computed: the rows of all others are packed one after the other between attentions."""
