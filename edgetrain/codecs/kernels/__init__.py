"""The inner loops of codecs: a C library and its NumPy twin, equal bit for bit.

Numbers in, numbers out: this folder knows no codec and no layout of tensors. contract.py says what
an implementation offers, chosen.py picks one; only chosen.py imports implementations.
"""
