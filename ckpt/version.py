"""The version of this package: in every manifest, and read by the build."""

__version__ = "0.1.0"
