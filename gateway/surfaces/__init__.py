"""One module for each API that apps speak: how it is read, what is injected and stripped, how its errors look."""
