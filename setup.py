"""Hands over to setup.cfg, and says what the source distribution holds besides the package."""

from setuptools import setup
from setuptools.command.sdist import sdist


class SourceDistribution(sdist):
    """The source distribution: also tests, pages, examples, benchmarks, and what the Makefile needs."""

    def make_distribution(self) -> None:
        """Add the files that setup.cfg does not name, and write the archive."""
        for name in ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "Makefile", "SECURITY.md"):
            self.filelist.include(name)
        for folder in (".ci", ".github", "benchmarks", "configs", "contrib", "docs", "examples", "tests"):
            self.filelist.graft(folder)
        for pattern in ("__pycache__", "*.py[cod]", ".DS_Store"):
            self.filelist.global_exclude(pattern)
        super().make_distribution()


setup(cmdclass={"sdist": SourceDistribution})
