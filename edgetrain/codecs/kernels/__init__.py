"""What codecs spend their time in: a C library and its NumPy twin, equal bit for bit.

No codec, no vector layout: numbers in, numbers out.
"""
