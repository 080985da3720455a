"""Are trained models as accurate as untouched ones, and do the policies keep within their bounds?"""
