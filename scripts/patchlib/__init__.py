"""Library behind the patchset scripts.

Owns everything that reads, proves, applies, checks and exports the patches in
`patches/`. Standard library only: it must run on a bare Python. Must never import
the overlay package, the patched engine, or anything from a package index.
"""
