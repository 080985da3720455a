"""How fast is the codec, and which stored format adds the least variance in its bytes?"""
