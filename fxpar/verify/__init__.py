"""Proofs that a program is right: static checks after every pass, and values on simulated ranks."""
