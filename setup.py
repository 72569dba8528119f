"""Tidegate's packaging; what there is to say stands in setup.cfg."""

from setuptools import setup

setup()
