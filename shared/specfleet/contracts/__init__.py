"""What services promise one another: ids, states, the capture contract and the error tree. Imports no torch."""
