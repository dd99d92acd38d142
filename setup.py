"""What setup.cfg cannot say: an editable installation has the data files, too."""

from setuptools import Distribution, setup


class _Distribution(Distribution):
    # Before setuptools installs them, it asks for this name, which Distribution lacks.
    has_data = Distribution.has_data_files


setup(distclass=_Distribution)
