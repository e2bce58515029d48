"""Puts the patch set onto a PyTorch tree and takes it off again.

Imports run one way: ``patch`` (what a patch is) <- ``topics`` (one patch each) <-
``series`` (their order); ``patch`` <- ``target`` (the tree at hand) <- ``images``
(what each file was, is and becomes) <- ``transaction`` (writing it) <- ``apply``
(the command). Standard library only: it runs on whatever Python a machine has, from
3.9 on.
"""
