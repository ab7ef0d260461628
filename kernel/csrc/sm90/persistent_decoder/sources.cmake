radix_sm90_family(persistent_decoder persistent_decoder.cu)
radix_instantiate(persistent_decoder launch "void launch<@>(const Params&, rk_device, rk_stream)"
                  VARIANTS "Form<false, false>" "Form<true, false>" "Form<false, true>" "Form<true, true>")
