"""Who a machine is and who may come in: key pairs, keyrings, tokens, the gate."""
