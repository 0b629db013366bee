"""Optimizers of parallel modules."""

from fxpar.optim.muon import Muon as Muon
