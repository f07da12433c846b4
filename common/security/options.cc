#include "common/security/options.h"

#include "absl/strings/str_cat.h"

namespace zeroshard::security {
namespace {

// A name that a script left empty must not mean plaintext. An empty variable of the environment is
// one that is not set.
const CLI::Validator& NotEmpty() {
  static const CLI::Validator* const validator = new CLI::Validator(
      [](const std::string& path) {
        return path.empty() ? "seen no name, wanted a file's; leave the option out to go without"
                            : std::string();
      },
      "");
  return *validator;
}

}  // namespace

void AddSecurityOptions(CLI::App* app, SecurityOptions* options, Role own) {
  app->add_option(
         "--tls-cert", options->cert,
         absl::StrCat("PEM file of this ", NameOf(own), "'s certificate, with ", UriOf(own),
                      " among its names. Read again when it changes, like the others."))
      ->type_name("FILE")
      ->check(NotEmpty())
      ->envname(kVariables[0]);
  app->add_option("--tls-key", options->key, "PEM file of the certificate's key.")
      ->type_name("FILE")
      ->check(NotEmpty())
      ->envname(kVariables[1]);
  app->add_option("--tls-ca", options->ca,
                  "PEM file of the authorities that peers' certificates are signed by.")
      ->type_name("FILE")
      ->check(NotEmpty())
      ->envname(kVariables[2]);
  if (own == Role::kClient || own == Role::kCoordinator) {
    app->add_option("--token-file", options->token_file,
                    own == Role::kClient
                        ? "File with the token that is sent instead of a certificate."
                        : "File with tokens, one a line, that clients may send instead of a "
                          "certificate.")
        ->type_name("FILE")
        ->check(NotEmpty())
        ->envname(kVariables[3]);
  }
  app->add_flag("--insecure", options->insecure,
                "Speak to other hosts without TLS: nobody is asked who they are.")
      ->envname(kVariables[4]);
}

}  // namespace zeroshard::security
