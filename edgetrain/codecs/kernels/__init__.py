"""The inner loops of codecs: a C library and its NumPy twin, equal bit for bit.

Numbers in, numbers out: this folder knows no codec and no layout of tensors. numpy_twin.py says
what each loop does, chosen.py picks an implementation; only chosen.py imports them.
"""
