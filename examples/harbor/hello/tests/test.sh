#!/bin/bash
if grep -q hello /app/word.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
