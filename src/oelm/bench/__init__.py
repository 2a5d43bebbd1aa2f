"""Benchmarks: optimiser steps and generation, timed side by side."""
